"""Graph-temporal traffic speed prediction."""
import argparse
import pickle

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

MAX_NORM = 1e-9


class GraphGRU(nn.Module):
    def __init__(self, adj, d=64, horizon=12):
        super().__init__()
        self.register_buffer("a", adj)
        self.gate, self.cand = nn.Linear(2 * (1 + d), 2 * d), nn.Linear(2 * (1 + d), d)
        self.read = nn.Linear(d, horizon)
        self.d = d

    def hop(self, x):
        return torch.cat([x, torch.einsum("nm,bmf->bnf", self.a, x)], -1)

    def forward(self, seq):
        b, t, n = seq.shape
        h = seq.new_zeros(b, n, self.d)
        for k in range(t):
            x = seq[:, k, :, None]
            z, r = torch.sigmoid(self.gate(self.hop(torch.cat([x, h], -1)))).chunk(2, -1)
            c = torch.tanh(self.cand(self.hop(torch.cat([x, r * h], -1))))
            h = z * h + (1 - z) * c
        return self.read(h).transpose(1, 2)


def masked_mae(pred, y):
    m = (y != 0).float()
    return ((pred - y).abs() * m).sum() / m.sum().clamp(min=1)


def windows(arr, ctx=12, hor=12):
    i = np.arange(len(arr) - ctx - hor)
    return np.stack([arr[k:k + ctx] for k in i]), np.stack([arr[k + ctx:k + ctx + hor] for k in i])


def load(args):
    speed = np.load(args.speed).astype(np.float32)
    with open(args.adj, "rb") as f:
        adj = torch.tensor(pickle.load(f), dtype=torch.float32)
    adj = adj / adj.sum(1, keepdim=True).clamp(min=1e-6)
    a, b = int(0.7 * len(speed)), int(0.8 * len(speed))
    mu, sd = speed[:a].mean(), speed[:a].std()
    sets = []
    for part in (speed[:a], speed[a:b], speed[b:]):
        x, y = windows(part)
        sets.append(TensorDataset(torch.from_numpy((x - mu) / sd), torch.from_numpy(y)))
    return sets, adj, float(mu), float(sd)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--speed", default="metr-la.npy")
    ap.add_argument("--adj", default="adj.pkl")
    ap.add_argument("--epochs", type=int, default=80)
    args = ap.parse_args()
    dev = torch.device("cuda")
    (tr, va, te), adj, mu, sd = load(args)
    train, valid, test = DataLoader(tr, 64, shuffle=True), DataLoader(va, 128), DataLoader(te, 128)
    net = GraphGRU(adj).to(dev)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, [20, 40, 60], 0.1)

    def error(dl):
        net.eval()
        with torch.no_grad():
            e = [masked_mae(net(x.to(dev)) * sd + mu, y.to(dev)).item() for x, y in dl]
        return float(np.mean(e))

    for ep in range(args.epochs):
        net.train()
        run = []
        for x, y in train:
            opt.zero_grad()
            loss = masked_mae(net(x.to(dev)) * sd + mu, y.to(dev))
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
            opt.step()
            run.append(loss.item())
        sched.step()
        print(f"{ep} train {np.mean(run):.3f} valid {error(valid):.3f}")
    print(f"test MAE {error(test):.3f}")


if __name__ == "__main__":
    main()
