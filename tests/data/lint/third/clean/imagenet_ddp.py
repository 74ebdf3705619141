# launch: torchrun --nproc_per_node=8 imagenet_ddp.py /path/to/imagenet
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torchvision
from torch.cuda.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms as T

EPOCHS, BATCH, BASE_LR, WARM = 90, 128, 0.1, 5


def build_data(root):
    norm = T.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    train = torchvision.datasets.ImageFolder(os.path.join(root, "train"), T.Compose(
        [T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor(), norm]))
    val = torchvision.datasets.ImageFolder(os.path.join(root, "val"), T.Compose(
        [T.Resize(256), T.CenterCrop(224), T.ToTensor(), norm]))
    ts = DistributedSampler(train)
    vs = DistributedSampler(val, shuffle=False)
    return (DataLoader(train, BATCH, sampler=ts, num_workers=8, pin_memory=True, drop_last=True),
            DataLoader(val, BATCH, sampler=vs, num_workers=8, pin_memory=True), ts)


def split_decay(model, wd):
    yes, no = [], []
    for p in model.parameters():
        (no if p.ndim <= 1 else yes).append(p)
    return [{"params": yes, "weight_decay": wd}, {"params": no, "weight_decay": 0.0}]


def finish_step(scaler, optimizer, params, max_norm):
    """Everything that happens after the gradients are there."""
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
    scaler.step(optimizer)
    scaler.update()
    return norm


def validate(model, loader, device):
    was_training = model.training
    model.eval()
    hits = torch.zeros(2, device=device)
    with torch.inference_mode():
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            with autocast():
                out = model(x)
            hits[0] += (out.argmax(1) == y).sum()
            hits[1] += y.numel()
    dist.all_reduce(hits)
    model.train(was_training)
    return (hits[0] / hits[1]).item()


def main(root):
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    world = dist.get_world_size()
    train_dl, val_dl, sampler = build_data(root)
    model = torchvision.models.resnet50(num_classes=1000).to(device)
    model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(model), device_ids=[local])
    lr = BASE_LR * BATCH * world / 256
    optimizer = torch.optim.SGD(split_decay(model, 1e-4), lr=lr, momentum=0.9)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=WARM)
    cos = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS - WARM)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cos], milestones=[WARM])
    scaler = GradScaler()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    best = 0.0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for i, (x, y) in enumerate(train_dl):
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with autocast():
                loss = criterion(model(x), y)
            scaler.scale(loss).backward()
            gn = finish_step(scaler, optimizer, model.parameters(), 5.0)
            if i % 100 == 0 and local == 0:
                print(f"[{epoch}:{i}] loss {loss.item():.3f} |g| {float(gn):.2f}")
        scheduler.step()
        acc = validate(model, val_dl, device)
        if dist.get_rank() == 0 and acc > best:
            best = acc
            torch.save({"model": model.module.state_dict(), "acc": acc}, "best.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
