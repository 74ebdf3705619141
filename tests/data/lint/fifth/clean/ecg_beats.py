import json
import random
from dataclasses import dataclass, asdict

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Cfg:
    npz: str = "mitbih_beats.npz"
    n_classes: int = 5
    batch: int = 256
    epochs: int = 40
    peak_lr: float = 2e-3
    gamma: float = 2.0
    seed: int = 17


def seed_all(s):
    random.seed(s)
    np.random.seed(s)
    torch.manual_seed(s)


class FocalLoss(nn.Module):
    def __init__(self, gamma, alpha=None):
        super().__init__()
        self.gamma = gamma
        self.register_buffer("alpha", alpha)

    def forward(self, logits, y):
        logp = F.log_softmax(logits, dim=-1)
        logpt = logp.gather(1, y[:, None]).squeeze(1)
        pt = logpt.exp()
        nll = F.nll_loss(logp, y, weight=self.alpha, reduction="none")
        return ((1 - pt) ** self.gamma * nll).mean()


def block(i, o):
    return nn.Sequential(nn.Conv1d(i, o, 7, padding=3), nn.BatchNorm1d(o), nn.GELU(), nn.MaxPool1d(2))


class BeatNet(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.body = nn.Sequential(block(1, 32), block(32, 64), block(64, 128))
        self.head = nn.Linear(128, n)

    def forward(self, x):
        return self.head(self.body(x).mean(-1))


def loaders(cfg):
    z = np.load(cfg.npz)
    out = []
    for split in ("train", "dev"):
        x = torch.from_numpy(z[f"{split}_x"]).float().unsqueeze(1)
        y = torch.from_numpy(z[f"{split}_y"]).long()
        out.append(DataLoader(TensorDataset(x, y), cfg.batch, shuffle=split == "train", drop_last=split == "train"))
    counts = np.bincount(z["train_y"], minlength=cfg.n_classes)
    alpha = torch.tensor(counts.sum() / (cfg.n_classes * counts), dtype=torch.float32)
    return (*out, alpha)


@torch.inference_mode()
def macro_f1(model, loader, n, dev):
    model.eval()
    cm = torch.zeros(n, n)
    for x, y in loader:
        prob = F.softmax(model(x.to(dev)), dim=1)
        for t, p in zip(y, prob.argmax(1).cpu()):
            cm[t, p] += 1
    tp = cm.diag()
    f1 = 2 * tp / (cm.sum(0) + cm.sum(1)).clamp(min=1)
    return f1.mean().item()


if __name__ == "__main__":
    cfg = Cfg()
    seed_all(cfg.seed)
    dev = "cuda" if torch.cuda.is_available() else "cpu"
    train_dl, dev_dl, alpha = loaders(cfg)
    model = BeatNet(cfg.n_classes).to(dev)
    crit = FocalLoss(cfg.gamma, alpha).to(dev)
    optim = torch.optim.AdamW(model.parameters(), lr=cfg.peak_lr, weight_decay=1e-2)
    one = torch.optim.lr_scheduler.OneCycleLR(optim, cfg.peak_lr, total_steps=cfg.epochs * len(train_dl), pct_start=0.3)
    best = 0.0
    for ep in range(cfg.epochs):
        model.train()
        for x, y in train_dl:
            loss = crit(model(x.to(dev)), y.to(dev))
            loss.backward()
            optim.step()
            one.step()
            optim.zero_grad()
        f1 = macro_f1(model, dev_dl, cfg.n_classes, dev)
        print(json.dumps({"epoch": ep, "last_loss": loss.item(), "dev_f1": f1}))
        if f1 > best:
            best = f1
            torch.save({"cfg": asdict(cfg), "model": model.state_dict()}, "beatnet_best.pt")
