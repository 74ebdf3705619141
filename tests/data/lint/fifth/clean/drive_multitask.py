"""Joint depth + semantic training on driving frames with projected conflicting gradients."""
import argparse
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from roadset import RoadFrames


class Shared(nn.Module):
    def __init__(self, c=64):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, c, 5, 2, 2), nn.GroupNorm(8, c), nn.ReLU(),
                                 nn.Conv2d(c, 2 * c, 3, 2, 1), nn.GroupNorm(8, 2 * c), nn.ReLU(),
                                 nn.Conv2d(2 * c, 2 * c, 3, 1, 1), nn.GroupNorm(8, 2 * c), nn.ReLU())

    def forward(self, x):
        return self.net(x)


def head(c, o):
    return nn.Sequential(nn.Conv2d(c, c, 3, 1, 1), nn.ReLU(), nn.Conv2d(c, o, 1))


class Perception(nn.Module):
    def __init__(self, n_cls=19):
        super().__init__()
        self.shared = Shared()
        self.heads = nn.ModuleDict({"depth": head(128, 1), "seg": head(128, n_cls)})

    def forward(self, x):
        f = self.shared(x)
        size = x.shape[-2:]
        return {k: F.interpolate(h(f), size, mode="bilinear") for k, h in self.heads.items()}


def task_losses(out, depth, seg):
    valid = depth > 0
    return {
        "depth": (out["depth"].squeeze(1)[valid] - depth[valid].log()).abs().mean(),
        "seg": F.cross_entropy(out["seg"], seg, ignore_index=255),
    }


def surgery(model, losses):
    """Backward per task over one forward graph; shared gradients get projected, head gradients accumulate."""
    shared = list(model.shared.parameters())
    flat = {}
    names = list(losses)
    for i, name in enumerate(names):
        for p in shared:
            p.grad = None
        losses[name].backward(retain_graph=i < len(names) - 1)
        flat[name] = torch.cat([p.grad.flatten() for p in shared])
    merged = torch.zeros_like(flat[names[0]])
    for a in names:
        g = flat[a].clone()
        for b in random.sample(names, len(names)):
            if b != a:
                dot = g @ flat[b]
                if dot < 0:
                    g -= dot / flat[b].pow(2).sum().clamp(min=1e-12) * flat[b]
        merged += g
    at = 0
    for p in shared:
        p.grad = merged[at:at + p.numel()].view_as(p).clone()
        at += p.numel()


@torch.no_grad()
def evaluate(model, loader, dev):
    model.eval()
    tot = {"depth": 0.0, "seg": 0.0}
    for img, depth, seg in loader:
        for k, v in task_losses(model(img.to(dev)), depth.to(dev), seg.to(dev)).items():
            tot[k] += v.item() / len(loader)
    return tot


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", required=True)
    ap.add_argument("--epochs", type=int, default=40)
    a = ap.parse_args()
    dev = torch.device("cuda")
    model = Perception().to(dev)
    opt = torch.optim.Adam(model.parameters(), lr=1e-4)
    poly = torch.optim.lr_scheduler.PolynomialLR(opt, total_iters=a.epochs, power=0.9)
    tr = DataLoader(RoadFrames(a.root, "train"), 8, shuffle=True, num_workers=8)
    va = DataLoader(RoadFrames(a.root, "val"), 8, num_workers=4)
    for ep in range(a.epochs):
        model.train()
        for img, depth, seg in tr:
            opt.zero_grad()
            losses = task_losses(model(img.to(dev)), depth.to(dev), seg.to(dev))
            surgery(model, losses)
            opt.step()
        poly.step()
        print(ep, {k: f"{v.item():.3f}" for k, v in losses.items()}, evaluate(model, va, dev))


if __name__ == "__main__":
    main()
