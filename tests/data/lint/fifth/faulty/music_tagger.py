"""Frame-level instrument activity tagging."""
from collections import defaultdict
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from openmic import ActivityClips


class History:
    """Keeps per-step curves and writes a summary once per epoch."""

    def __init__(self):
        self.curves = defaultdict(list)

    def add(self, **kw):
        for k, v in kw.items():
            self.curves[k].append(v)

    def flush(self, epoch):
        out = {k: float(sum(v) / len(v)) for k, v in self.curves.items()}
        self.curves.clear()
        print(epoch, {k: round(v, 4) for k, v in out.items()})
        return out


class Tagger(nn.Module):
    def __init__(self, n_tags=20, mels=96, d=192):
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(mels, d, 5, padding=2), nn.BatchNorm1d(d), nn.ReLU(), nn.Dropout(0.25))
        self.rnn = nn.GRU(d, d // 2, 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(d, n_tags)

    def forward(self, mel):
        h, _ = self.rnn(self.front(mel).transpose(1, 2))
        return self.out(h)


def masked_bce(logits, y, mask):
    l = F.binary_cross_entropy_with_logits(logits, y, reduction="none")
    return (l * mask).sum() / mask.sum().clamp(min=1)


@torch.no_grad()
def f1(net, loader, dev):
    net.eval()
    tp = fp = fn = 0
    for mel, y, m in loader:
        p = (torch.sigmoid(net(mel.to(dev))).cpu() > 0.5) & m.bool()
        t = (y > 0.5) & m.bool()
        tp += (p & t).sum().item()
        fp += (p & ~t).sum().item()
        fn += (~p & t).sum().item()
    return 2 * tp / max(2 * tp + fp + fn, 1)


def main():
    torch.manual_seed(99)
    dev = torch.device("cuda")
    root = Path("/data/openmic")
    tr = DataLoader(ActivityClips(root, "train"), 32, shuffle=True, num_workers=6)
    va = DataLoader(ActivityClips(root, "val"), 32, num_workers=4)
    net = Tagger().to(dev)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 50)
    hist = History()
    best = 0.0
    for epoch in range(50):
        net.train()
        for mel, y, m in tr:
            mel, y, m = mel.to(dev), y.to(dev), m.to(dev)
            loss = masked_bce(net(mel), y, m)
            opt.zero_grad()
            loss.backward()
            gn = nn.utils.clip_grad_norm_(net.parameters(), 3.0)
            opt.step()
            hist.add(loss=loss, grad_norm=gn.item())
        sched.step()
        hist.flush(epoch)
        score = f1(net, va, dev)
        if score > best:
            best = score
            torch.save(net.state_dict(), "tagger.pt")
            print(f"  new best val F1 {best:.4f}")


if __name__ == "__main__":
    main()
