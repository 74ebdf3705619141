"""Patch-based 3D liver segmentation."""
import argparse
import pathlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from ctpatches import PatchSet


def vol(i, o):
    return nn.Sequential(nn.Conv3d(i, o, 3, padding=1), nn.InstanceNorm3d(o, affine=True), nn.LeakyReLU(0.01, True),
                         nn.Conv3d(o, o, 3, padding=1), nn.InstanceNorm3d(o, affine=True), nn.LeakyReLU(0.01, True))


class VNet(nn.Module):
    def __init__(self, f=16, n=3):
        super().__init__()
        self.a, self.b, self.c = vol(1, f), vol(f, 2 * f), vol(2 * f, 4 * f)
        self.ub, self.ua = vol(6 * f, 2 * f), vol(3 * f, f)
        self.cls = nn.Conv3d(f, n, 1)

    def forward(self, x):
        a = self.a(x)
        b = self.b(F.max_pool3d(a, 2))
        c = self.c(F.max_pool3d(b, 2))
        b = self.ub(torch.cat([F.interpolate(c, scale_factor=2.0), b], 1))
        return self.cls(self.ua(torch.cat([F.interpolate(b, scale_factor=2.0), a], 1)))


def soft_dice(logits, y):
    p = logits.float().softmax(1)
    t = F.one_hot(y, p.size(1)).permute(0, 4, 1, 2, 3).float()
    dims = (0, 2, 3, 4)
    return 1 - (2 * (p * t).sum(dims) / ((p + t).sum(dims) + 1e-5))[1:].mean()


class VolumeTrainer:
    def __init__(self, opts):
        self.o = opts
        self.net = VNet().cuda()
        self.optim = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.99, nesterov=True, weight_decay=3e-5)
        self.poly = torch.optim.lr_scheduler.PolynomialLR(self.optim, opts.epochs, power=0.9)
        self.scaler = torch.amp.GradScaler("cuda")

    def forward_loss(self, x, y):
        with torch.autocast("cuda", dtype=torch.float16):
            out = self.net(x)
            ce = F.cross_entropy(out, y)
        return ce + soft_dice(out, y)

    def optimise(self, loss):
        self.optim.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 12.0)
        self.scaler.unscale_(self.optim)
        self.scaler.step(self.optim)
        self.scaler.update()

    def train_epoch(self, dl):
        self.net.train()
        acc = 0.0
        for x, y in dl:
            loss = self.forward_loss(x.cuda(), y.cuda())
            self.optimise(loss)
            acc += loss.item()
        self.poly.step()
        return acc / len(dl)

    @torch.no_grad()
    def dice(self, dl):
        self.net.eval()
        vals = []
        for x, y in dl:
            with torch.autocast("cuda", dtype=torch.float16):
                out = self.net(x.cuda())
            vals.append(1 - soft_dice(out, y.cuda()).item())
        return sum(vals) / len(vals)

    def run(self, tr, va):
        best = 0.0
        for e in range(self.o.epochs):
            l, d = self.train_epoch(tr), self.dice(va)
            print(f"{e:04d} {l:.4f} {d:.4f}")
            if d > best:
                best = d
                torch.save(self.net.state_dict(), self.o.out / "best.pt")


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--data", type=pathlib.Path, required=True)
    p.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."))
    p.add_argument("--epochs", type=int, default=300)
    o = p.parse_args()
    tr = DataLoader(PatchSet(o.data / "train"), 2, shuffle=True, num_workers=6)
    va = DataLoader(PatchSet(o.data / "val"), 2, num_workers=2)
    VolumeTrainer(o).run(tr, va)
