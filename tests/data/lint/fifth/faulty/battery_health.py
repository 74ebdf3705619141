"""State-of-health regression from charge curves (attention over cycles)."""
import argparse
import copy

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from cells import CycleWindows


class CurveEncoder(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.f = nn.Sequential(nn.Conv1d(3, d, 7, 2, 3), nn.BatchNorm1d(d), nn.GELU(), nn.Conv1d(d, d, 5, 2, 2),
                               nn.BatchNorm1d(d), nn.GELU(), nn.AdaptiveAvgPool1d(1), nn.Flatten())

    def forward(self, x):
        return self.f(x)


class SoH(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.curve = CurveEncoder(d)
        self.att = nn.MultiheadAttention(d, 4, dropout=0.1, batch_first=True)
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        b, k = x.shape[:2]
        h = self.curve(x.flatten(0, 1)).view(b, k, -1)
        y, _ = self.att(h[:, -1:], h, h)
        return self.out(y.squeeze(1)).squeeze(1)


def fit(model, loader, opt, device):
    model.train()
    tot = 0.0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        loss = nn.functional.huber_loss(model(x), y, delta=0.05)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        tot += loss.item()
    return tot / len(loader)


def predict(model, loader, device):
    model.eval()
    preds, truth = [], []
    for x, y in loader:
        out = model(x.to(device))
        preds.append(out.detach().cpu())
        truth.append(y)
    return torch.cat(preds).numpy(), torch.cat(truth).numpy()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="nasa_cells")
    ap.add_argument("--val-cells", nargs="+", default=["B0007"])
    ap.add_argument("--test-cells", nargs="+", default=["B0018"])
    ap.add_argument("--epochs", type=int, default=150)
    ap.add_argument("--patience", type=int, default=20)
    a = ap.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train = DataLoader(CycleWindows(a.data, exclude=a.val_cells + a.test_cells), 32, shuffle=True, drop_last=True)
    val = DataLoader(CycleWindows(a.data, only=a.val_cells), 64)
    test = DataLoader(CycleWindows(a.data, only=a.test_cells), 64)
    model = SoH().to(device)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=30)
    best, best_state, waited = np.inf, None, 0
    for ep in range(a.epochs):
        tl = fit(model, train, opt, device)
        sched.step()
        p, y = predict(model, val, device)
        rmse = float(np.sqrt(np.mean((p - y) ** 2)))
        print(f"{ep} {tl:.5f} val rmse {rmse:.4f}")
        if rmse < best:
            best, best_state, waited = rmse, copy.deepcopy(model.state_dict()), 0
        else:
            waited += 1
            if waited > a.patience:
                break
    model.load_state_dict(best_state)
    p, y = predict(model, test, device)
    print(f"test rmse {np.sqrt(np.mean((p - y) ** 2)):.4f} mae {np.abs(p - y).mean():.4f}")


if __name__ == "__main__":
    main()
