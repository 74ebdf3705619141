import logging
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from rollouts import TransitionDataset

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
log = logging.getLogger(__name__)


class RunningMean:
    """Averages what it is given and hands the value to the log."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.total, self.count = 0.0, 0

    def update(self, value):
        if math.isnan(value) or math.isinf(value):
            return
        self.total += value
        self.count += 1

    def compute(self):
        return self.total / max(self.count, 1)


class Dynamics(nn.Module):
    def __init__(self, s, a, h=400):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(s + a, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU(), nn.Linear(h, 2 * (s + 1)))

    def forward(self, s, a):
        mu, lv = self.net(torch.cat([s, a], -1)).chunk(2, -1)
        return mu, lv.clamp(-10, 4)


def nll(mu, lv, target):
    return (((mu - target) ** 2) * (-lv).exp() + lv).mean()


def fit(members, train_dl, val_dl, device, epochs=100, patience=6):
    opts = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in members]
    meter = RunningMean()
    best, stale = float("inf"), 0
    for epoch in range(epochs):
        meter.reset()
        for s, a, s2, r in train_dl:
            s, a, s2, r = (t.to(device) for t in (s, a, s2, r))
            tgt = torch.cat([s2 - s, r[:, None]], -1)
            for m, o in zip(members, opts):
                m.train()
                loss = nll(*m(s, a), tgt)
                o.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(m.parameters(), 10.0)
                o.step()
                meter.update(loss.item())
        val = validate(members, val_dl, device)
        log.info("epoch %d nll %.4f val mse %.5f", epoch, meter.compute(), val)
        if val < best - 1e-5:
            best, stale = val, 0
            torch.save([m.state_dict() for m in members], "ensemble.pt")
        else:
            stale += 1
            if stale >= patience:
                break


@torch.no_grad()
def validate(members, dl, device):
    total = n = 0.0
    for m in members:
        m.eval()
    for s, a, s2, r in dl:
        s, a, s2 = s.to(device), a.to(device), s2.to(device)
        pred = torch.stack([m(s, a)[0][:, :-1] for m in members]).mean(0)
        total += F.mse_loss(pred, s2 - s).item()
        n += 1
    return total / n


if __name__ == "__main__":
    dev = "cuda" if torch.cuda.is_available() else "cpu"
    tr, va = (DataLoader(TransitionDataset(x), 256, shuffle=x == "train") for x in ("train", "val"))
    fit([Dynamics(17, 6).to(dev) for _ in range(5)], tr, va, dev)
