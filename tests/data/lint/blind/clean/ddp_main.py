import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models, transforms


def setup():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    return local


def evaluate(model, loader, device):
    model.eval()
    stats = torch.zeros(2, device=device)
    with torch.no_grad():
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            stats[0] += (model(x).argmax(1) == y).sum()
            stats[1] += y.numel()
    dist.all_reduce(stats)
    return (stats[0] / stats[1]).item()


def main():
    local = setup()
    device = torch.device("cuda", local)
    tf = transforms.ToTensor()
    train_set = datasets.CIFAR100("data", train=True, transform=tf)
    test_set = datasets.CIFAR100("data", train=False, transform=tf)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, 128, sampler=sampler, num_workers=4, pin_memory=True)
    test_loader = DataLoader(test_set, 256, sampler=DistributedSampler(test_set, shuffle=False))

    model = DDP(models.resnet34(num_classes=100).to(device), device_ids=[local])
    world = dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * world, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)

    for epoch in range(100):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        scheduler.step()
        acc = evaluate(model, test_loader, device)
        if dist.get_rank() == 0:
            print(f"{epoch:3d} acc {acc:.4f}")
            torch.save(model.module.state_dict(), "last.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
