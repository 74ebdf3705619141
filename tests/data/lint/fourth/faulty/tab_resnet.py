import argparse
import copy

import numpy as np
import pandas as pd
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class ResBlock(nn.Module):
    def __init__(self, d, p):
        super().__init__()
        self.f = nn.Sequential(nn.BatchNorm1d(d), nn.Linear(d, 2 * d), nn.ReLU(), nn.Dropout(p), nn.Linear(2 * d, d))

    def forward(self, x):
        return x + self.f(x)


class TabResNet(nn.Module):
    def __init__(self, n_num, cards, d=192, depth=4, p=0.2):
        super().__init__()
        self.embs = nn.ModuleList(nn.Embedding(c, min(32, (c + 1) // 2)) for c in cards)
        width = n_num + sum(e.embedding_dim for e in self.embs)
        self.net = nn.Sequential(nn.Linear(width, d), *[ResBlock(d, p) for _ in range(depth)], nn.BatchNorm1d(d), nn.ReLU(), nn.Linear(d, 2))

    def forward(self, num, cat):
        return self.net(torch.cat([num] + [e(cat[:, i]) for i, e in enumerate(self.embs)], 1))


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.bad, self.state = patience, np.inf, 0, None

    def __call__(self, value, model):
        if value < self.best - 1e-5:
            self.best, self.bad, self.state = value, 0, copy.deepcopy(model.state_dict())
        else:
            self.bad += 1
        return self.bad >= self.patience


def prepare(path, seed, bs):
    df = pd.read_csv(path).sample(frac=1.0, random_state=seed)
    y = torch.tensor(df.pop("target").values)
    cats = df.select_dtypes("object").apply(lambda c: c.astype("category").cat.codes + 1)
    nums = df.select_dtypes("number").fillna(0.0)
    k = int(0.8 * len(df))
    nums = (nums - nums.iloc[:k].mean()) / (nums.iloc[:k].std() + 1e-8)
    num, cat = torch.tensor(nums.values, dtype=torch.float32), torch.tensor(cats.values.astype("int64"))
    sets = [TensorDataset(num[s], cat[s], y[s]) for s in (slice(0, k), slice(k, None))]
    dls = DataLoader(sets[0], bs, shuffle=True, drop_last=True), DataLoader(sets[1], 4 * bs)
    return dls, num.shape[1], [int(c) + 1 for c in cats.max()]


def mean_loss(model, loader, device):
    model.eval()
    tot = n = 0
    with torch.no_grad():
        for num, cat, y in loader:
            out = model(num.to(device), cat.to(device))
            tot += F.cross_entropy(out, y.to(device), reduction="sum").item()
            n += len(y)
    return tot / n


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--csv", default="adult.csv")
    ap.add_argument("--epochs", type=int, default=100)
    ap.add_argument("--bs", type=int, default=256)
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    (train_loader, val_loader), n_num, cards = prepare(args.csv, args.seed, args.bs)
    model = TabResNet(n_num, cards).to(device)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4)
    stopper = EarlyStopping(patience=8)
    for epoch in range(args.epochs):
        model.train()
        for num, cat, y in train_loader:
            loss = F.cross_entropy(model(num.to(device), cat.to(device)), y.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        val_loss = mean_loss(model, train_loader, device)
        print(f"epoch {epoch}: val loss {val_loss:.4f}")
        if stopper(val_loss, model):
            break
    model.load_state_dict(stopper.state)
    print(f"held-out loss {mean_loss(model, val_loader, device):.4f}")
    torch.save(stopper.state, "tab_resnet.pt")


if __name__ == "__main__":
    main()
