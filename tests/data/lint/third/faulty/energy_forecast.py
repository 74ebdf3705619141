import argparse

import pandas as pd
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):
    def __init__(self, series, n_in=168, n_out=24):
        self.s, self.i, self.o = series, n_in, n_out

    def __len__(self):
        return len(self.s) - self.i - self.o

    def __getitem__(self, k):
        return self.s[k:k + self.i, None], self.s[k + self.i:k + self.i + self.o]


class Forecaster(nn.Module):
    def __init__(self, h=96, n_out=24):
        super().__init__()
        self.rnn = nn.LSTM(1, h, 2, batch_first=True, dropout=0.2)
        self.fc = nn.Linear(h, n_out)

    def forward(self, x):
        return self.fc(self.rnn(x)[0][:, -1])


def fit_batch(model, opt, crit, x, y, clip):
    opt.zero_grad()
    loss = crit(model(x), y)
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    loss.backward()
    opt.step()
    return loss.item()


def evaluate(model, dl, crit, dev):
    model.eval()
    with torch.no_grad():
        return sum(crit(model(x.to(dev)), y.to(dev)).item() for x, y in dl) / len(dl)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("csv")
    ap.add_argument("--epochs", type=int, default=30)
    ap.add_argument("--clip", type=float, default=1.0)
    args = ap.parse_args()
    dev = "cuda" if torch.cuda.is_available() else "cpu"
    s = torch.tensor(pd.read_csv(args.csv)["load"].to_numpy(), dtype=torch.float32)
    cut = int(0.8 * len(s))
    mu, sd = s[:cut].mean(), s[:cut].std()
    s = (s - mu) / sd
    train_dl = DataLoader(Windows(s[:cut]), 128, shuffle=True)
    val_dl = DataLoader(Windows(s[cut:]), 256)
    model = Forecaster().to(dev)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=3, factor=0.5)
    crit = nn.HuberLoss()
    for epoch in range(args.epochs):
        model.train()
        losses = [fit_batch(model, opt, crit, x.to(dev), y.to(dev), args.clip) for x, y in train_dl]
        val = evaluate(model, val_dl, crit, dev)
        sched.step(val)
        print(f"{epoch:3d} train {sum(losses) / len(losses):.4f} val {val:.4f}")
    torch.save(model.state_dict(), "forecaster.pt")


if __name__ == "__main__":
    main()
