"""Centre-point detector head with focal loss on heat-maps."""
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch.utils.data import DataLoader

from points import PointDataset, collate


class CenterNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        r = torchvision.models.resnet34(weights="IMAGENET1K_V1")
        self.backbone = nn.Sequential(*list(r.children())[:-2])
        ups, c = [], 512
        for o in (256, 128, 64):
            ups += [nn.ConvTranspose2d(c, o, 4, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(True)]
            c = o
        self.up = nn.Sequential(*ups)
        self.heat = nn.Conv2d(64, classes, 1)
        self.size = nn.Conv2d(64, 2, 1)
        nn.init.constant_(self.heat.bias, -2.19)

    def forward(self, x):
        h = self.up(self.backbone(x))
        return self.heat(h), self.size(h)


def focal_with_logits(logits, target, alpha=0.25, gamma=2.0):
    ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    p = torch.sigmoid(logits)
    pt = p * target + (1 - p) * (1 - target)
    w = alpha * target + (1 - alpha) * (1 - target)
    return (w * (1 - pt) ** gamma * ce).sum() / target.sum().clamp(min=1)


def losses(model, batch, dev):
    img, heat, size, mask = (b.to(dev, non_blocking=True) for b in batch)
    hm, sz = model(img)
    cls = focal_with_logits(hm, heat)
    box = (F.l1_loss(sz, size, reduction="none") * mask).sum() / mask.sum().clamp(min=1)
    return {"cls": cls, "box": 0.1 * box}


def train_one_epoch(model, dl, opt, warm, dev, epoch):
    model.train()
    track = {}
    for it, batch in enumerate(dl):
        parts = losses(model, batch, dev)
        loss = sum(parts.values())
        if not torch.isfinite(loss):
            raise RuntimeError(f"loss became {loss.item()} at epoch {epoch} iteration {it}")
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        opt.step()
        if warm is not None:
            warm.step()
        for k, v in parts.items():
            track[k] = track.get(k, 0.0) + v.item()
    return {k: v / len(dl) for k, v in track.items()}


@torch.no_grad()
def validate(model, dl, dev):
    model.eval()
    return sum(sum(losses(model, b, dev).values()).item() for b in dl) / len(dl)


def main():
    dev = torch.device("cuda")
    tr = DataLoader(PointDataset("train"), 16, shuffle=True, num_workers=8, collate_fn=collate, pin_memory=True)
    va = DataLoader(PointDataset("val"), 16, num_workers=8, collate_fn=collate)
    model = CenterNet(20).to(dev)
    opt = torch.optim.SGD([
        {"params": model.backbone.parameters(), "lr": 0.002},
        {"params": [*model.up.parameters(), *model.heat.parameters(), *model.size.parameters()]},
    ], lr=0.02, momentum=0.9, weight_decay=1e-4)
    drop = torch.optim.lr_scheduler.StepLR(opt, 15, 0.1)
    best = float("inf")
    for epoch in range(45):
        warm = torch.optim.lr_scheduler.LinearLR(opt, 0.001, total_iters=min(1000, len(tr) - 1)) if epoch == 0 else None
        stats = train_one_epoch(model, tr, opt, warm, dev, epoch)
        drop.step()
        val = validate(model, va, dev)
        print(epoch, {k: round(v, 4) for k, v in stats.items()}, "val", round(val, 4))
        if val < best:
            best = val
            torch.save(model.state_dict(), "centernet.pth")


if __name__ == "__main__":
    main()
