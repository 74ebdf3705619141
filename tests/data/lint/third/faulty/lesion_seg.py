import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torchvision.models.segmentation import deeplabv3_resnet50

from isic import LesionDataset


def dice_loss(logits, target):
    p = torch.sigmoid(logits)
    num = 2 * (p * target).sum((1, 2, 3)) + 1
    den = p.sum((1, 2, 3)) + target.sum((1, 2, 3)) + 1
    return (1 - num / den).mean()


def iou(model, loader, dev):
    model.eval()
    inter = union = 0.0
    with torch.no_grad():
        for img, mask in loader:
            pred = model(img.to(dev))["out"] > 0
            mask = mask.to(dev).bool()
            inter += (pred & mask).sum().item()
            union += (pred | mask).sum().item()
    return inter / max(union, 1)


def train_epoch(model, loader, opt, dev):
    model.train()
    tot = 0.0
    for img, mask in loader:
        img, mask = img.to(dev, non_blocking=True), mask.to(dev, non_blocking=True)
        opt.zero_grad(set_to_none=True)
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            logits = model(img)["out"]
            loss = F.binary_cross_entropy_with_logits(logits, mask) + dice_loss(logits, mask)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        opt.step()
        tot += loss.item()
    return tot / len(loader)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--root", default="isic")
    p.add_argument("--epochs", type=int, default=60)
    p.add_argument("--batch", type=int, default=12)
    p.add_argument("--lr", type=float, default=2e-4)
    a = p.parse_args()
    dev = torch.device("cuda")
    tr = DataLoader(LesionDataset(a.root, "train"), a.batch, shuffle=True, num_workers=6, drop_last=True)
    va = DataLoader(LesionDataset(a.root, "val"), a.batch, num_workers=6)
    model = deeplabv3_resnet50(weights=None, num_classes=1).to(dev)
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, a.epochs, eta_min=1e-6)
    best = 0.0
    for e in range(a.epochs):
        loss = train_epoch(model, tr, opt, dev)
        sched.step()
        score = iou(model, va, dev)
        print(f"{e:02d} loss {loss:.4f} IoU {score:.4f}")
        if score > best:
            best = score
            torch.save(model.state_dict(), "lesion_best.pt")


if __name__ == "__main__":
    main()
