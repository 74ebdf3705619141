import math
import random

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

cfg = dict(epochs=100, batch=256, lr=3e-3, betas=(0.9, 0.999), wd=0.05,
           warmup_steps=10,
           clip=1.0, dim=192, depth=9, heads=6, patch=4, seed=17)


class ViT(nn.Module):
    def __init__(self, dim, depth, heads, patch, classes=100, size=32):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, 0.1, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        return self.head(self.norm(self.blocks(x))[:, 0])


def lr_factor(step, total):
    w = cfg["warmup_steps"]
    if step < w:
        return (step + 1) / w
    return 0.5 * (1 + math.cos(math.pi * (step - w) / max(1, total - w)))


def param_groups(model):
    mats = [p for n, p in model.named_parameters() if p.ndim == 2 or p.ndim == 4]
    others = [p for n, p in model.named_parameters() if p.ndim in (1, 3)]
    return [{"params": mats, "weight_decay": cfg["wd"]}, {"params": others, "weight_decay": 0.0}]


def evaluate(model, dl):
    model.eval()
    with torch.no_grad():
        hits = sum((model(x.cuda()).argmax(1).cpu() == y).sum().item() for x, y in dl)
    return hits / len(dl.dataset)


def main():
    for f in (random.seed, np.random.seed, torch.manual_seed):
        f(cfg["seed"])
    norm = transforms.Normalize((0.507, 0.487, 0.441), (0.267, 0.256, 0.276))
    aug = transforms.Compose([transforms.RandomCrop(32, 4), transforms.RandomHorizontalFlip(), transforms.RandAugment(),
                              transforms.ToTensor(), norm])
    tr = datasets.CIFAR100("data", True, aug, download=True)
    te = datasets.CIFAR100("data", False, transforms.Compose([transforms.ToTensor(), norm]))
    dl = DataLoader(tr, cfg["batch"], shuffle=True, num_workers=8, drop_last=True)
    vdl = DataLoader(te, 512, num_workers=4)
    model = ViT(cfg["dim"], cfg["depth"], cfg["heads"], cfg["patch"]).cuda()
    opt = torch.optim.AdamW(param_groups(model), lr=cfg["lr"], betas=cfg["betas"])
    total = cfg["epochs"] * len(dl)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: lr_factor(s, total))
    crit = nn.CrossEntropyLoss(label_smoothing=0.1)
    for ep in range(cfg["epochs"]):
        model.train()
        run = 0.0
        for x, y in dl:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = crit(model(x.cuda()), y.cuda())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), cfg["clip"])
            opt.step()
            sched.step()
            run += loss.item()
        print(f"{ep} loss {run / len(dl):.4f} test {evaluate(model, vdl):.4f}")
    torch.save(model.state_dict(), "vit_tiny.pt")


if __name__ == "__main__":
    main()
