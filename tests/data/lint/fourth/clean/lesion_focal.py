import argparse
import json

import segmentation_models_pytorch as smp
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from lesions import LesionDataset


class FocalLoss(nn.Module):
    def __init__(self, alpha=0.75, gamma=2.0):
        super().__init__()
        self.alpha, self.gamma = alpha, gamma

    def forward(self, logits, target):
        p = torch.sigmoid(logits)
        ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        pt = p * target + (1 - p) * (1 - target)
        w = self.alpha * target + (1 - self.alpha) * (1 - target)
        return (w * (1 - pt) ** self.gamma * ce).mean()


def tversky(logits, target, a=0.3, b=0.7):
    p = logits.sigmoid()
    tp = (p * target).sum((1, 2, 3))
    fp = (p * (1 - target)).sum((1, 2, 3))
    fn = ((1 - p) * target).sum((1, 2, 3))
    return (1 - (tp + 1) / (tp + a * fp + b * fn + 1)).mean()


def groups(model, lr, wd):
    enc = list(model.encoder.named_parameters())
    head = [(n, p) for n, p in model.named_parameters() if not n.startswith("encoder.")]
    out = []
    for named, rate in ((enc, lr * 0.1), (head, lr)):
        out.append({"params": [p for _, p in named if p.ndim > 1], "lr": rate, "weight_decay": wd})
        out.append({"params": [p for _, p in named if p.ndim <= 1], "lr": rate, "weight_decay": 0.0})
    return out


@torch.no_grad()
def iou(net, loader, thr=0.5):
    net.eval()
    inter = union = 0
    for x, m in loader:
        pred = net(x.cuda()).sigmoid() > thr
        m = m.cuda().bool()
        inter += (pred & m).sum().item()
        union += (pred | m).sum().item()
    return inter / max(union, 1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=80)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--accum", type=int, default=4)
    args = ap.parse_args()
    torch.manual_seed(2021)
    splits = json.load(open("splits.json"))
    train_dl = DataLoader(LesionDataset(splits["train"], augment=True), 8, shuffle=True, num_workers=8, drop_last=True)
    val_dl = DataLoader(LesionDataset(splits["val"]), 8, num_workers=4)
    model = smp.Unet("resnet34", encoder_weights="imagenet", classes=1).cuda()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999), use_buffers=True)
    opt = torch.optim.AdamW(groups(model, args.lr, 1e-2), lr=args.lr)
    sched = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=20)
    focal = FocalLoss()
    best = 0.0
    for epoch in range(args.epochs):
        model.train()
        log = 0.0
        opt.zero_grad()
        for i, (x, m) in enumerate(train_dl, 1):
            x, m = x.cuda(), m.cuda().float()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = model(x)
            logits = logits.float()
            loss = focal(logits, m) + 0.5 * tversky(logits, m)
            (loss / args.accum).backward()
            log += loss.item()
            if i % args.accum == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
                opt.step()
                opt.zero_grad()
                ema.update_parameters(model)
        sched.step()
        score = iou(ema, val_dl)
        print(f"{epoch} loss {log / len(train_dl):.4f} ema val iou {score:.4f}")
        if score > best:
            best = score
            torch.save(ema.module.state_dict(), "lesion_best.pt")


if __name__ == "__main__":
    main()
