import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision.models import mobilenet_v3_large

from nyu import NYUDepth


class DepthNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = mobilenet_v3_large(weights="DEFAULT").features
        dims, layers = [960, 256, 128, 64, 32], []
        for i, o in zip(dims, dims[1:]):
            layers += [nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.Upsample(scale_factor=2, mode="bilinear")]
        self.dec = nn.Sequential(*layers, nn.Conv2d(32, 1, 3, padding=1))

    def forward(self, x):
        return F.softplus(self.dec(self.enc(x)))


def silog(pred, gt, lam=0.85):
    m = gt > 1e-3
    d = pred[m].clamp(min=1e-3).log() - gt[m].log()
    return ((d ** 2).mean() - lam * d.mean() ** 2).clamp(min=1e-8).sqrt()


def evaluate(model, loader, device):
    model.eval()
    rel = d1 = 0.0
    for img, gt in loader:
        img, gt = img.to(device), gt.to(device)
        pred = model(img)
        m = gt > 1e-3
        ratio = torch.max(pred[m] / gt[m], gt[m] / pred[m])
        rel += ((pred[m] - gt[m]).abs() / gt[m]).mean().item()
        d1 += (ratio < 1.25).float().mean().item()
    return rel / len(loader), d1 / len(loader)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="nyu_v2")
    ap.add_argument("--bs", type=int, default=8)
    ap.add_argument("--epochs", type=int, default=25)
    ap.add_argument("--lr", type=float, default=1e-4)
    args = ap.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_dl = DataLoader(NYUDepth(args.root, "train"), args.bs, shuffle=True, num_workers=8, drop_last=True)
    val_dl = DataLoader(NYUDepth(args.root, "test"), args.bs, num_workers=4)
    model = DepthNet().to(device)
    opt = torch.optim.Adam([{"params": model.enc.parameters(), "lr": args.lr / 10}, {"params": model.dec.parameters()}], lr=args.lr)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, [args.lr / 10, args.lr], total_steps=args.epochs * len(train_dl))
    best = 1e9
    for epoch in range(args.epochs):
        model.train()
        t0, total = time.time(), 0.0
        for img, gt in train_dl:
            opt.zero_grad()
            loss = silog(model(img.to(device)), gt.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            sched.step()
            total += loss.item()
        rel, d1 = evaluate(model, val_dl, device)
        print(f"{epoch} silog {total / len(train_dl):.4f} rel {rel:.4f} d1 {d1:.4f} ({time.time() - t0:.0f}s)")
        if rel < best:
            best = rel
            torch.save(model.state_dict(), "depth.pt")


if __name__ == "__main__":
    main()
