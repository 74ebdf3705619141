import argparse
import math

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class RunningMean:
    def __init__(self):
        self.s, self.n = 0.0, 0

    def push(self, v, k=1):
        if math.isfinite(v):
            self.s += v * k
            self.n += k

    @property
    def value(self):
        return self.s / max(self.n, 1)


class TideNet(nn.Module):
    """GRU over gauges with a Gaussian output per lead time."""

    def __init__(self, n_gauge, lead, d=96):
        super().__init__()
        self.gru = nn.GRU(n_gauge, d, 2, batch_first=True, dropout=0.1)
        self.mean, self.logvar = nn.Linear(d, lead), nn.Linear(d, lead)

    def forward(self, x):
        h, _ = self.gru(x)
        return self.mean(h[:, -1]), self.logvar(h[:, -1])


def gaussian_nll(mu, lv, y):
    return 0.5 * (lv + (y - mu) ** 2 / lv.exp()).mean()


def datasets(path, ctx, lead):
    g = np.load(path).astype(np.float32)
    cut = int(0.8 * len(g))
    mu, sd = g[:cut].mean(0), g[:cut].std(0)
    g = (g - mu) / sd

    def mk(part):
        idx = range(len(part) - ctx - lead)
        x = np.stack([part[i:i + ctx] for i in idx])
        y = np.stack([part[i + ctx:i + ctx + lead, 0] for i in idx])
        return TensorDataset(torch.from_numpy(x), torch.from_numpy(y))

    return mk(g[:cut]), mk(g[cut:]), g.shape[1]


@torch.no_grad()
def rmse(net, dl, dev):
    net.eval()
    se = n = 0
    for x, y in dl:
        mu, _ = net(x.to(dev))
        se += (mu - y.to(dev)).pow(2).sum().item()
        n += y.numel()
    return math.sqrt(se / n)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--gauges", default="gauges.npy")
    ap.add_argument("--ctx", type=int, default=72)
    ap.add_argument("--lead", type=int, default=12)
    ap.add_argument("--lr", type=float, default=1e-3)
    a = ap.parse_args()
    dev = "cuda" if torch.cuda.is_available() else "cpu"
    tr, va, n = datasets(a.gauges, a.ctx, a.lead)
    train, val = DataLoader(tr, 256, shuffle=True), DataLoader(va, 512)
    net = TideNet(n, a.lead).to(dev)
    opt = torch.optim.Adam(net.parameters(), lr=a.lr)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 40)
    for ep in range(40):
        net.train()
        meter = RunningMean()
        for x, y in train:
            mu, lv = net(x.to(dev))
            loss = gaussian_nll(mu, lv, y.to(dev))
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            meter.push(loss.item(), len(x))
        sched.step()
        print(f"{ep:02d} nll {meter.value:.4f} val rmse {rmse(net, val, dev):.4f}")
    torch.save(net.state_dict(), "tide.pt")


if __name__ == "__main__":
    main()
