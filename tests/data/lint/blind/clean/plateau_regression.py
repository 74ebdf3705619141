"""House price regression with ReduceLROnPlateau and gradient clipping by value."""
import argparse

import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def frame_to_dataset(path):
    df = pd.read_csv(path)
    y = torch.tensor(df.pop("price").values, dtype=torch.float32).log()
    x = torch.tensor(df.values, dtype=torch.float32)
    return TensorDataset(x, y)


def run_epoch(model, loader, loss_fn, opt=None):
    training = opt is not None
    model.train(training)
    total = 0.0
    with torch.set_grad_enabled(training):
        for x, y in loader:
            loss = loss_fn(model(x).squeeze(1), y)
            if training:
                opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_value_(model.parameters(), 1.0)
                opt.step()
            total += loss.item() * len(x)
    return total / len(loader.dataset)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("csv")
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--epochs", type=int, default=100)
    args = ap.parse_args()

    data = frame_to_dataset(args.csv)
    n_val = len(data) // 5
    train_set, val_set = random_split(data, [len(data) - n_val, n_val], generator=torch.Generator().manual_seed(1))
    train_loader = DataLoader(train_set, 64, shuffle=True)
    val_loader = DataLoader(val_set, 512)

    d = data.tensors[0].shape[1]
    model = nn.Sequential(nn.Linear(d, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 1))
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, mode="min", factor=0.3, patience=5)
    loss_fn = nn.HuberLoss()

    for epoch in range(args.epochs):
        tr = run_epoch(model, train_loader, loss_fn, opt)
        va = run_epoch(model, val_loader, loss_fn)
        sched.step(va)
        print(f"{epoch:03d} train {tr:.5f} val {va:.5f}")


if __name__ == "__main__":
    main()
