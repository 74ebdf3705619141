import argparse
import os

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class UserRows(Dataset):
    def __init__(self, matrix):
        self.m = torch.from_numpy(matrix).float()

    def __len__(self):
        return len(self.m)

    def __getitem__(self, i):
        return self.m[i]


class AutoRec(nn.Module):
    def __init__(self, n_items, k=500, p=0.2):
        super().__init__()
        self.enc = nn.Linear(n_items, k)
        self.dec = nn.Linear(k, n_items)
        self.p = p

    def forward(self, x):
        h = torch.sigmoid(self.enc(x))
        return self.dec(nn.functional.dropout(h, self.p, self.training))


def masked_rmse(model, loader, device):
    model.eval()
    se = n = 0.0
    with torch.no_grad():
        for x in loader:
            x = x.to(device)
            m = x > 0
            se += ((model(x) - x)[m] ** 2).sum().item()
            n += m.sum().item()
    return (se / n) ** 0.5


class EarlyStopper:
    def __init__(self, patience, path):
        self.best, self.left, self.patience, self.path = float("inf"), patience, patience, path

    def __call__(self, value, model):
        if value < self.best:
            self.best, self.left = value, self.patience
            torch.save(model.state_dict(), self.path)
        else:
            self.left -= 1
        return self.left <= 0


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--ratings", default="ml1m.npz")
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--epochs", type=int, default=300)
    ap.add_argument("--out", default="runs")
    args = ap.parse_args()
    os.makedirs(args.out, exist_ok=True)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    blob = np.load(args.ratings)
    train_loader = DataLoader(UserRows(blob["train"]), 256, shuffle=True)
    val_loader = DataLoader(UserRows(blob["val"]), 256)
    model = AutoRec(blob["train"].shape[1]).to(device)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    stopper = EarlyStopper(10, os.path.join(args.out, "autorec.pt"))
    for epoch in range(args.epochs):
        model.train()
        for x in train_loader:
            x = x.to(device)
            m = (x > 0).float()
            loss = ((model(x) - x) ** 2 * m).sum() / m.sum()
            opt.zero_grad()
            loss.backward()
            opt.step()
        val_rmse = masked_rmse(model, train_loader, device)
        print(f"epoch {epoch} val rmse {val_rmse:.4f}")
        if stopper(val_rmse, model):
            break
    model.load_state_dict(torch.load(os.path.join(args.out, "autorec.pt")))
    print(f"final rmse on held-out users {masked_rmse(model, val_loader, device):.4f}")


if __name__ == "__main__":
    main()
