"""Binary cough detection, DDP-capable, early stopping on validation loss."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from coughs import Snippets


class CoughNet(nn.Module):
    def __init__(self, c=32):
        super().__init__()
        stages, i = [], 1
        for o in (c, 2 * c, 4 * c):
            stages += [nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.SiLU(), nn.MaxPool2d(2)]
            i = o
        self.f = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(i, 1))

    def forward(self, mel):
        return self.f(mel).squeeze(1)


class Stopper:
    def __init__(self, patience):
        self.patience, self.best, self.bad = patience, float("inf"), 0

    def __call__(self, value):
        improved = value < self.best
        self.best, self.bad = (value, 0) if improved else (self.best, self.bad + 1)
        return improved, self.bad >= self.patience


def loaders(root, bs):
    out = {}
    for split in ("train", "val"):
        ds = Snippets(root, split)
        out[split] = DataLoader(ds, bs, sampler=DistributedSampler(ds, shuffle=split == "train"), num_workers=4)
    return out


@torch.no_grad()
def mean_loss(model, loader, dev):
    model.eval()
    acc = torch.zeros(2, device=dev)
    for mel, y in loader:
        acc[0] += F.binary_cross_entropy_with_logits(model(mel.to(dev)), y.to(dev).float(), reduction="sum")
        acc[1] += len(y)
    dist.all_reduce(acc)
    return (acc[0] / acc[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", required=True)
    ap.add_argument("--epochs", type=int, default=100)
    ap.add_argument("--bs", type=int, default=64)
    a = ap.parse_args()
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dev = torch.device("cuda", rank)
    dls = loaders(a.root, a.bs)
    model = DistributedDataParallel(CoughNet().to(dev), device_ids=[rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, a.epochs)
    stop = Stopper(8)
    for ep in range(a.epochs):
        dls["train"].sampler.set_epoch(ep)
        model.train()
        for mel, y in dls["train"]:
            loss = F.binary_cross_entropy_with_logits(model(mel.to(dev)), y.to(dev).float())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        sched.step()
        val_loss = mean_loss(model, dls["train"], dev)
        improved, done = stop(val_loss)
        if rank == 0:
            print(f"{ep} last {loss.item():.4f} val {val_loss:.4f}", flush=True)
            if improved:
                torch.save(model.module.state_dict(), "cough_best.pt")
        if done:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
