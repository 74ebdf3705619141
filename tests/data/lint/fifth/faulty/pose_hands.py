"""Hand keypoint heatmaps, step-based schedule with periodic validation."""
import argparse
import itertools

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from freihand import Hands


class Hour(nn.Module):
    def __init__(self, c=96, joints=21):
        super().__init__()
        cbr = lambda i, o, s=1: nn.Sequential(nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(True))
        self.stem = nn.Sequential(cbr(3, c // 2, 2), cbr(c // 2, c, 2))
        self.down = nn.Sequential(cbr(c, c, 2), cbr(c, 2 * c, 2), nn.Dropout2d(0.1))
        self.up = nn.Sequential(nn.Upsample(scale_factor=2), cbr(2 * c, c), nn.Upsample(scale_factor=2), cbr(c, c))
        self.out = nn.Conv2d(c, joints, 1)

    def forward(self, x):
        s = self.stem(x)
        return self.out(s + self.up(self.down(s)))


def peaks(h):
    w = h.size(-1)
    idx = h.flatten(2).argmax(-1)
    return torch.stack([idx % w, idx // w], -1).float()


def pck(net, loader, dev, thr=2.0):
    net.eval()
    ok = n = 0
    with torch.no_grad():
        for img, hm in loader:
            d = (peaks(net(img.to(dev))) - peaks(hm.to(dev))).norm(dim=-1)
            ok += (d < thr).sum().item()
            n += d.numel()
    return ok / n


def endless(loader):
    while True:
        yield from loader


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="/data/freihand")
    ap.add_argument("--steps", type=int, default=60_000)
    ap.add_argument("--val-every", type=int, default=2000)
    ap.add_argument("--lr", type=float, default=1e-3)
    a = ap.parse_args()
    dev = torch.device("cuda")
    tr = DataLoader(Hands(a.root, "train"), 64, shuffle=True, num_workers=8, drop_last=True)
    va = DataLoader(Hands(a.root, "val"), 64, num_workers=4)
    net = Hour().to(dev)
    opt = torch.optim.Adam(net.parameters(), lr=a.lr)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, [40_000, 50_000], 0.1)
    best, window = 0.0, 0.0
    net.train()
    for step, (img, hm) in enumerate(itertools.islice(endless(tr), a.steps), 1):
        img, hm = img.to(dev, non_blocking=True), hm.to(dev, non_blocking=True)
        loss = nn.functional.mse_loss(net(img), hm)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        sched.step()
        window += loss.item()
        if step % 100 == 0:
            print(f"{step} {window / 100:.5f}")
            window = 0.0
        if step % a.val_every == 0:
            score = pck(net, va, dev)
            print(f"{step} PCK {score:.4f}")
            if score > best:
                best = score
                torch.save(net.state_dict(), "hands.pt")


if __name__ == "__main__":
    main()
