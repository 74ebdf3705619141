import argparse
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.cuda import amp
from torch.utils.data import DataLoader
from torchvision.models import mobilenet_v3_large

from rgbd import Rooms


class DepthNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = mobilenet_v3_large(weights="DEFAULT").features
        self.dec = nn.Sequential(nn.Conv2d(960, 128, 1), nn.BatchNorm2d(128), nn.ReLU(),
                                 nn.Upsample(scale_factor=4, mode="bilinear"), nn.Conv2d(128, 64, 3, padding=1),
                                 nn.BatchNorm2d(64), nn.ReLU(), nn.Upsample(scale_factor=8, mode="bilinear"),
                                 nn.Conv2d(64, 1, 3, padding=1))

    def forward(self, x):
        return self.dec(self.enc(x)).squeeze(1)


def silog(pred, gt, lam=0.85):
    m = gt > 0.1
    g = pred.float()[m] - gt[m].log()
    return torch.sqrt((g ** 2).mean() - lam * g.mean() ** 2 + 1e-6)


def setup(a):
    net = DepthNet().cuda()
    opt = torch.optim.AdamW([{"params": net.enc.parameters(), "lr": a.lr / 10}, {"params": net.dec.parameters()}],
                            lr=a.lr, weight_decay=1e-2)
    return SimpleNamespace(net=net, opt=opt, scaler=amp.GradScaler(),
                           sched=torch.optim.lr_scheduler.CosineAnnealingLR(opt, a.epochs))


def step(s, rgb, gt, clip):
    with amp.autocast():
        pred = s.net(rgb)
    loss = silog(pred, gt)
    s.opt.zero_grad()
    s.scaler.scale(loss).backward()
    s.scaler.unscale_(s.opt)
    nn.utils.clip_grad_norm_(s.net.parameters(), clip)
    s.scaler.step(s.opt)
    return loss.item()


@torch.no_grad()
def abs_rel(s, loader):
    s.net.eval()
    tot = n = 0
    for rgb, gt in loader:
        gt = gt.cuda()
        with amp.autocast():
            d = s.net(rgb.cuda())
        m = gt > 0.1
        tot += ((d.float().exp() - gt).abs() / gt.clamp(min=0.1))[m].sum().item()
        n += m.sum().item()
    s.net.train()
    return tot / n


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--root", default="/data/rooms")
    p.add_argument("--epochs", type=int, default=25)
    p.add_argument("--lr", type=float, default=5e-4)
    p.add_argument("--clip", type=float, default=1.0)
    a = p.parse_args()
    tr = DataLoader(Rooms(a.root, "train"), 16, shuffle=True, num_workers=8, drop_last=True)
    te = DataLoader(Rooms(a.root, "test"), 16, num_workers=4)
    s = setup(a)
    s.net.train()
    for ep in range(a.epochs):
        losses = [step(s, rgb.cuda(), gt.cuda(), a.clip) for rgb, gt in tr]
        s.sched.step()
        print(f"epoch {ep}: silog {sum(losses) / len(losses):.4f}, absrel {abs_rel(s, te):.4f}")
        torch.save(s.net.state_dict(), "depth_last.pt")


if __name__ == "__main__":
    main()
