"""Stateful LSTM rainfall-runoff model; each lane of the batch is one gauged basin read in time order."""
import argparse

import numpy as np
import torch
import torch.nn as nn


class Runoff(nn.Module):
    def __init__(self, n_in, hidden=128, static=12):
        super().__init__()
        self.static = nn.Linear(static, 16)
        self.lstm = nn.LSTM(n_in + 16, hidden, batch_first=True)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(hidden, 1))

    def forward(self, x, attrs, state=None):
        s = torch.tanh(self.static(attrs))[:, None].expand(-1, x.size(1), -1)
        y, state = self.lstm(torch.cat([x, s], -1), state)
        return self.head(y).squeeze(-1), state


class Basins:
    def __init__(self, path, years):
        z = np.load(path)
        keep = np.isin(z["year"], years)
        self.x = torch.from_numpy(z["forcing"][:, keep]).float()
        self.q = torch.from_numpy(z["discharge"][:, keep]).float()
        self.attrs = torch.from_numpy(z["attrs"]).float()

    def chunks(self, n):
        for i in range(0, self.x.size(1) - n + 1, n):
            yield self.x[:, i:i + n], self.q[:, i:i + n]


def nse_loss(sim, obs, eps=0.1):
    ok = ~torch.isnan(obs)
    std = torch.nan_to_num(obs).std(1, keepdim=True).expand_as(obs)
    return (((sim - torch.nan_to_num(obs)) ** 2) / (std + eps) ** 2)[ok].mean()


@torch.no_grad()
def evaluate(model, basins, dev, n=365):
    model.eval()
    state, vals = None, []
    attrs = basins.attrs.to(dev)
    for x, q in basins.chunks(n):
        sim, state = model(x.to(dev), attrs, state)
        vals.append(nse_loss(sim, q.to(dev)).item())
    return 1 - float(np.mean(vals))


def train_epoch(model, basins, opt, dev, n, clip):
    model.train()
    attrs = basins.attrs.to(dev)
    state, total, k = None, 0.0, 0
    for x, q in basins.chunks(n):
        opt.zero_grad()
        sim, state = model(x.to(dev), attrs, state)
        loss = nse_loss(sim, q.to(dev))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        total += loss.item()
        k += 1
    return total / k


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--npz", default="camels.npz")
    ap.add_argument("--window", type=int, default=90)
    ap.add_argument("--epochs", type=int, default=50)
    ap.add_argument("--clip", type=float, default=1.0)
    a = ap.parse_args()
    torch.manual_seed(6)
    dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tr, va = Basins(a.npz, range(1990, 2005)), Basins(a.npz, range(2005, 2010))
    model = Runoff(tr.x.size(-1)).to(dev)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, 15, 0.5)
    best = -1e9
    for ep in range(a.epochs):
        l = train_epoch(model, tr, opt, dev, a.window, a.clip)
        sched.step()
        nse = evaluate(model, va, dev)
        print(f"{ep} loss {l:.4f} val NSE {nse:.4f}")
        if nse > best:
            best = nse
            torch.save(model.state_dict(), "runoff.pt")


if __name__ == "__main__":
    main()
