import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torchvision.models as models
import torchvision.transforms as T
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import ImageFolder


class Meter:
    def __init__(self, device):
        self.t = torch.zeros(3, device=device)

    def add(self, loss, correct, n):
        self.t += torch.stack([loss.detach() * n, correct.float(), torch.tensor(float(n), device=loss.device)])

    def reduce(self):
        dist.all_reduce(self.t)
        return (self.t[0] / self.t[2]).item(), (self.t[1] / self.t[2]).item()


def loaders(args):
    norm = T.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    tr = ImageFolder(os.path.join(args.data, "train"), T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor(), norm]))
    va = ImageFolder(os.path.join(args.data, "val"), T.Compose([T.Resize(256), T.CenterCrop(224), T.ToTensor(), norm]))
    ts, vs = DistributedSampler(tr), DistributedSampler(va, shuffle=False)
    return (DataLoader(tr, args.batch_size, sampler=ts, num_workers=8, pin_memory=True, drop_last=True), ts,
            DataLoader(va, args.batch_size, sampler=vs, num_workers=8, pin_memory=True))


def train_one_epoch(model, loader, criterion, optimizer, scaler, device):
    model.train()
    meter = Meter(device)
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        with torch.cuda.amp.autocast():
            out = model(x)
            loss = criterion(out, y)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        meter.add(loss, (out.argmax(1) == y).sum(), x.size(0))
    return meter.reduce()


@torch.no_grad()
def validate(model, loader, criterion, device):
    model.eval()
    meter = Meter(device)
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        with torch.cuda.amp.autocast():
            out = model(x)
            loss = criterion(out, y)
        meter.add(loss, (out.argmax(1) == y).sum(), x.size(0))
    return meter.reduce()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("data")
    p.add_argument("--batch-size", type=int, default=128)
    p.add_argument("--epochs", type=int, default=90)
    p.add_argument("--lr", type=float, default=0.1)
    args = p.parse_args()
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)

    train_loader, sampler, val_loader = loaders(args)
    model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(models.resnet50()).to(device), device_ids=[rank])
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr * dist.get_world_size() * args.batch_size / 256, momentum=0.9, weight_decay=1e-4)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    cos = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs - 5)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cos], milestones=[5])
    scaler = torch.cuda.amp.GradScaler()
    best = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        tl, ta = train_one_epoch(model, train_loader, criterion, optimizer, scaler, device)
        vl, va = validate(model, val_loader, criterion, device)
        scheduler.step()
        if dist.get_rank() == 0:
            print(f"{epoch}: train {tl:.3f}/{ta:.3f} val {vl:.3f}/{va:.3f}")
            if va > best:
                best = va
                torch.save(model.module.state_dict(), "resnet50_best.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
