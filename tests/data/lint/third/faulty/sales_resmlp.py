import argparse

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def get_args():
    p = argparse.ArgumentParser("store sales regression")
    p.add_argument("--train", default="train.npz")
    p.add_argument("--valid", default="valid.npz")
    p.add_argument("--epochs", type=int, default=50)
    p.add_argument("--batch-size", type=int, default=1024)
    p.add_argument("--lr", type=float, default=0.5)
    p.add_argument("--weight-decay", type=float, default=1e-4)
    p.add_argument("--width", type=int, default=256)
    p.add_argument("--blocks", type=int, default=4)
    p.add_argument("--grad-clip", type=float, default=1.0)
    return p.parse_args()


class ResBlock(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.f = nn.Sequential(nn.BatchNorm1d(w), nn.Linear(w, 2 * w), nn.ReLU(), nn.Dropout(0.15), nn.Linear(2 * w, w))

    def forward(self, x):
        return x + self.f(x)


class ResMLP(nn.Module):
    def __init__(self, d, w, n):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, w), *[ResBlock(w) for _ in range(n)], nn.BatchNorm1d(w), nn.ReLU(), nn.Linear(w, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def load(path, bs, shuffle, stats=None):
    z = np.load(path)
    x, y = z["x"].astype(np.float32), np.log1p(z["y"]).astype(np.float32)
    stats = stats or (x.mean(0), x.std(0) + 1e-6)
    x = (x - stats[0]) / stats[1]
    return DataLoader(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), bs, shuffle=shuffle, drop_last=shuffle), stats


@torch.no_grad()
def rmsle(model, loader, device):
    model.eval()
    se, n = 0.0, 0
    for x, y in loader:
        se += (model(x.to(device)) - y.to(device)).pow(2).sum().item()
        n += len(y)
    return (se / n) ** 0.5


def main():
    args = get_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader, stats = load(args.train, args.batch_size, True)
    valid_loader, _ = load(args.valid, 4096, False, stats)
    model = ResMLP(len(stats[0]), args.width, args.blocks).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    best = float("inf")
    for epoch in range(args.epochs):
        model.train()
        running = 0.0
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = nn.functional.smooth_l1_loss(model(x.to(device)), y.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
            optimizer.step()
            running += loss.item()
        scheduler.step()
        score = rmsle(model, valid_loader, device)
        print(f"{epoch:3d} train {running / len(train_loader):.4f} valid rmsle {score:.4f}")
        if score < best:
            best = score
            torch.save(model.state_dict(), "sales.pt")


if __name__ == "__main__":
    main()
