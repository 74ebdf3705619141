import argparse
import logging
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader

from geotiles import TilePairs

log = logging.getLogger("roofs")


def double(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(True),
                         nn.Conv2d(o, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(True))


class SmallUNet(nn.Module):
    def __init__(self, bands=4, base=32):
        super().__init__()
        self.d1, self.d2, self.d3 = double(bands, base), double(base, base * 2), double(base * 2, base * 4)
        self.u2, self.u1 = double(base * 6, base * 2), double(base * 3, base)
        self.out = nn.Conv2d(base, 1, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(F.max_pool2d(a, 2))
        c = self.d3(F.max_pool2d(b, 2))
        b = self.u2(torch.cat([F.interpolate(c, scale_factor=2), b], 1))
        a = self.u1(torch.cat([F.interpolate(b, scale_factor=2), a], 1))
        return self.out(a)


def dice_from_logits(logits, mask):
    p = logits.float().sigmoid()
    inter = (p * mask).sum((1, 2, 3))
    return 1 - ((2 * inter + 1) / (p.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)).mean()


class Session:
    def __init__(self, args):
        self.args = args
        self.net = SmallUNet().cuda()
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=args.lr, weight_decay=1e-4)
        self.scaler = GradScaler()
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.opt, mode="max", patience=4, factor=0.3)

    def criterion(self, logits, mask):
        return F.binary_cross_entropy_with_logits(logits, mask) + dice_from_logits(logits, mask)

    def apply_gradients(self):
        self.scaler.unscale_(self.opt)
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), self.args.clip)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad(set_to_none=True)
        return norm

    def epoch(self, loader):
        self.net.train()
        total = 0.0
        for i, (img, mask) in enumerate(loader):
            img, mask = img.cuda(non_blocking=True), mask.cuda(non_blocking=True)
            with autocast():
                loss = self.criterion(self.net(img), mask)
            self.scaler.scale(loss).backward()
            norm = self.apply_gradients()
            total += loss.item()
            if i % 50 == 0:
                log.info("it %d loss %.4f grad %.3f scale %g", i, loss.item(), norm.item(), self.scaler.get_scale())
        return total / len(loader)

    @torch.no_grad()
    def iou(self, loader):
        self.net.eval()
        inter = union = 0
        for img, mask in loader:
            with autocast():
                pred = torch.sigmoid(self.net(img.cuda())) > 0.5
            m = mask.cuda() > 0.5
            inter += (pred & m).sum().item()
            union += (pred | m).sum().item()
        return inter / max(union, 1)


def cli():
    p = argparse.ArgumentParser()
    p.add_argument("--tiles", type=Path, required=True)
    p.add_argument("--epochs", type=int, default=50)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--clip", type=float, default=2.0)
    return p.parse_args()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    args = cli()
    s = Session(args)
    train = DataLoader(TilePairs(args.tiles / "train", augment=True), 16, shuffle=True, num_workers=8, pin_memory=True)
    val = DataLoader(TilePairs(args.tiles / "val"), 16, num_workers=4)
    best = -1.0
    for ep in range(args.epochs):
        tl = s.epoch(train)
        iou = s.iou(val)
        s.plateau.step(iou)
        log.info("epoch %d train %.4f IoU %.4f", ep, tl, iou)
        if iou > best:
            best = iou
            torch.save(s.net.state_dict(), "roofs_best.pt")
