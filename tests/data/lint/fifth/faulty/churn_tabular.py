"""Telecom churn from mixed tabular features."""
import argparse

import pandas as pd
import torch
import torch.nn as nn
from sklearn.metrics import average_precision_score
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset

CATS = ["plan", "region", "device"]
NUMS = ["tenure", "minutes", "data_gb", "calls_support", "bill"]


class TabNet(nn.Module):
    def __init__(self, cards, n_num, d=8):
        super().__init__()
        self.embs = nn.ModuleList(nn.Embedding(c, d) for c in cards)
        k = d * len(cards) + n_num
        self.bn = nn.BatchNorm1d(n_num)
        self.mlp = nn.Sequential(nn.Linear(k, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, c, x):
        e = [emb(c[:, i]) for i, emb in enumerate(self.embs)]
        return self.mlp(torch.cat([*e, self.bn(x)], 1)).squeeze(1)


def tensors(df, cats):
    c = torch.tensor(df[CATS].apply(lambda s: s.map(cats[s.name]).fillna(0)).values, dtype=torch.long)
    x = torch.tensor(df[NUMS].values, dtype=torch.float32)
    return TensorDataset(c, x, torch.tensor(df["churn"].values, dtype=torch.float32))


def ap_score(net, dl):
    net.eval()
    p, y = [], []
    with torch.no_grad():
        for c, x, t in dl:
            p.append(torch.sigmoid(net(c, x)))
            y.append(t)
    return average_precision_score(torch.cat(y), torch.cat(p))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--csv", default="churn.csv")
    ap.add_argument("--epochs", type=int, default=30)
    ap.add_argument("--batch-size", type=int, default=512)
    ap.add_argument("--learning-rate", type=float, default=0.5)
    ap.add_argument("--weight-decay", type=float, default=1e-2)
    a = ap.parse_args()
    torch.manual_seed(13)
    df = pd.read_csv(a.csv)
    tr_df, va_df = train_test_split(df, test_size=0.2, stratify=df.churn, random_state=13)
    cats = {c: {v: i + 1 for i, v in enumerate(sorted(tr_df[c].unique()))} for c in CATS}
    tr = DataLoader(tensors(tr_df, cats), a.batch_size, shuffle=True, drop_last=True)
    va = DataLoader(tensors(va_df, cats), 4096)
    net = TabNet([len(cats[c]) + 1 for c in CATS], len(NUMS))
    pos = (len(tr_df) - tr_df.churn.sum()) / tr_df.churn.sum()
    crit = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(float(pos)))
    opt = torch.optim.AdamW(net.parameters(), lr=a.learning_rate, weight_decay=a.weight_decay)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, a.epochs)
    best = 0.0
    for e in range(a.epochs):
        net.train()
        tot = 0.0
        for c, x, y in tr:
            opt.zero_grad()
            loss = crit(net(c, x), y)
            loss.backward()
            opt.step()
            tot += loss.item()
        sched.step()
        score = ap_score(net, va)
        print(f"{e:02d} {tot / len(tr):.4f} AP {score:.4f}")
        if score > best:
            best = score
            torch.save(net.state_dict(), "churn.pt")


if __name__ == "__main__":
    main()
