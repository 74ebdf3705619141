import argparse
import math
from collections import defaultdict

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from detection import CocoSmall, DetrLite, HungarianCriterion, coco_map, collate


class Tracker:
    """Averages named scalars over an epoch."""

    def __init__(self):
        self.sum, self.n = defaultdict(float), defaultdict(int)

    def update(self, **scalars):
        for k, v in scalars.items():
            if not math.isfinite(v):
                v = 0.0
            self.sum[k] += v
            self.n[k] += 1

    def __str__(self):
        return " ".join(f"{k} {self.sum[k] / max(1, self.n[k]):.4f}" for k in sorted(self.sum))


def make_optimizer(model, lr, lr_backbone):
    body = [p for n, p in model.named_parameters() if not n.startswith("backbone") and p.requires_grad]
    back = [p for n, p in model.named_parameters() if n.startswith("backbone") and p.requires_grad]
    return torch.optim.AdamW([{"params": body}, {"params": back, "lr": lr_backbone}], lr=lr, weight_decay=0.0)


def train_one_epoch(model, criterion, loader, opt, device, max_norm):
    model.train()
    track = Tracker()
    for images, targets in loader:
        images = images.to(device)
        targets = [{k: v.to(device) for k, v in t.items()} for t in targets]
        parts = criterion(model(images), targets)
        loss = sum(criterion.weights[k] * parts[k] for k in parts)
        opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        opt.step()
        track.update(total=loss.item(), grad=norm.item(), **{k: v.item() for k, v in parts.items()})
    return track


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    preds = []
    for images, targets in loader:
        out = model(images.to(device))
        probs = out["logits"].softmax(-1)[..., :-1]
        scores, labels = probs.max(-1)
        preds += [{"scores": s.cpu(), "labels": l.cpu(), "boxes": b.cpu(), "target": t}
                  for s, l, b, t in zip(scores, labels, out["boxes"], targets)]
    return coco_map(preds)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--lr-backbone", type=float, default=1e-5)
    p.add_argument("--epochs", type=int, default=150)
    p.add_argument("--drop", type=int, default=100)
    p.add_argument("--clip", type=float, default=0.1)
    args = p.parse_args()
    torch.manual_seed(42)
    device = torch.device("cuda")
    model = DetrLite(classes=20, queries=50).to(device)
    criterion = HungarianCriterion(20).to(device)
    opt = make_optimizer(model, args.lr, args.lr_backbone)
    sched = torch.optim.lr_scheduler.StepLR(opt, args.drop)
    train_dl = DataLoader(CocoSmall("train"), 8, shuffle=True, collate_fn=collate, num_workers=6, drop_last=True)
    val_dl = DataLoader(CocoSmall("val"), 8, collate_fn=collate, num_workers=4)
    for epoch in range(args.epochs):
        stats = train_one_epoch(model, criterion, train_dl, opt, device, args.clip)
        sched.step()
        print(f"epoch {epoch} {stats} mAP {evaluate(model, val_dl, device):.4f}")
        torch.save(model.state_dict(), "detr_lite.pt")


if __name__ == "__main__":
    main()
