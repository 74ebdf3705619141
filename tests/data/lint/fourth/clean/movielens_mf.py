import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class MF(nn.Module):
    def __init__(self, n_users, n_items, k=32):
        super().__init__()
        self.user = nn.Embedding(n_users, k, sparse=True)
        self.item = nn.Embedding(n_items, k, sparse=True)
        self.ub = nn.Embedding(n_users, 1, sparse=True)
        self.ib = nn.Embedding(n_items, 1, sparse=True)
        for e in (self.user, self.item):
            nn.init.normal_(e.weight, std=0.05)
        for e in (self.ub, self.ib):
            nn.init.zeros_(e.weight)
        self.mu = nn.Parameter(torch.tensor(3.5), requires_grad=False)

    def forward(self, u, i):
        dot = (self.user(u) * self.item(i)).sum(-1)
        return dot + self.ub(u).squeeze(-1) + self.ib(i).squeeze(-1) + self.mu


def load(path="ml-100k/u.data"):
    df = pd.read_csv(path, sep="\t", names=["u", "i", "r", "t"])
    df["u"] -= 1
    df["i"] -= 1
    rng = np.random.RandomState(0)
    mask = rng.rand(len(df)) < 0.9

    def ds(d):
        return TensorDataset(torch.tensor(d.u.values), torch.tensor(d.i.values), torch.tensor(d.r.values, dtype=torch.float32))

    return ds(df[mask]), ds(df[~mask]), df.u.max() + 1, df.i.max() + 1


def rmse(model, loader):
    model.eval()
    se, n = 0.0, 0
    with torch.no_grad():
        for u, i, r in loader:
            se += (model(u, i) - r).pow(2).sum().item()
            n += len(r)
    return (se / n) ** 0.5


def main():
    train_ds, val_ds, nu, ni = load()
    train_dl = DataLoader(train_ds, batch_size=1024, shuffle=True)
    val_dl = DataLoader(val_ds, batch_size=4096)
    model = MF(nu, ni)
    opt = torch.optim.SparseAdam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    best, bad = float("inf"), 0
    for epoch in range(50):
        model.train()
        for u, i, r in train_dl:
            opt.zero_grad()
            loss = nn.functional.mse_loss(model(u, i), r)
            loss.backward()
            opt.step()
        v = rmse(model, val_dl)
        print(f"epoch {epoch}: val rmse {v:.4f}")
        if v < best - 1e-4:
            best, bad = v, 0
            torch.save(model.state_dict(), "mf.pt")
        else:
            bad += 1
            if bad == 3:
                break
    print("best", best)


if __name__ == "__main__":
    main()
