"""torchrun --nproc_per_node=8 insects_ddp.py --root /data/insects"""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models
import torchvision.transforms.v2 as T


def transforms(train):
    ops = [T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.TrivialAugmentWide()] if train else \
        [T.Resize(256), T.CenterCrop(224)]
    return T.Compose([T.ToImage(), *ops, T.ToDtype(torch.float32, scale=True),
                      T.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])])


def make_loader(root, split, bs):
    ds = datasets.ImageFolder(os.path.join(root, split), transforms(split == "train"))
    sampler = DistributedSampler(ds, shuffle=split == "train", drop_last=split == "train")
    return DataLoader(ds, bs, sampler=sampler, num_workers=8, pin_memory=True), sampler, len(ds.classes)


def params_by_decay(model, wd):
    flat = [p for p in model.parameters() if p.ndim <= 1]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return [{"params": matrices, "weight_decay": wd}, {"params": flat, "weight_decay": 0.0}]


@torch.no_grad()
def top1(model, loader, device):
    model.eval()
    stat = torch.zeros(2, device=device)
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(x.to(device, non_blocking=True))
        stat[0] += (out.argmax(1) == y.to(device)).sum()
        stat[1] += y.numel()
    dist.all_reduce(stat)
    return (stat[0] / stat[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root")
    ap.add_argument("--epochs", type=int, default=90)
    ap.add_argument("--bs", type=int, default=128)
    ap.add_argument("--lr", type=float, default=0.8, help="for 8x128 images per step")
    args = ap.parse_args()

    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    train, sampler, n = make_loader(args.root, "train", args.bs)
    val, _, _ = make_loader(args.root, "val", args.bs)

    net = models.resnet50(num_classes=n).to(device, memory_format=torch.channels_last)
    opt = torch.optim.SGD(params_by_decay(net, 5e-5), lr=args.lr, momentum=0.9, nesterov=True)
    model = DDP(net, device_ids=[local])
    crit = nn.CrossEntropyLoss(label_smoothing=0.1)
    sched = torch.optim.lr_scheduler.SequentialLR(opt, [
        torch.optim.lr_scheduler.LinearLR(opt, start_factor=0.01, total_iters=5),
        torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs - 5)], milestones=[5])

    for ep in range(args.epochs):
        sampler.set_epoch(ep)
        model.train()
        t0 = time.time()
        for x, y in train:
            x = x.to(device, non_blocking=True, memory_format=torch.channels_last)
            y = y.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = crit(model(x), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        sched.step()
        acc = top1(model, val, device)
        if dist.get_rank() == 0:
            print(f"{ep} loss {loss.item():.3f} val {acc:.4f} {time.time() - t0:.0f}s", flush=True)
            torch.save(net.state_dict(), "insects_last.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
