import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms


class PlantNet(nn.Module):
    def __init__(self, n):
        super().__init__()
        chans, layers = [3, 32, 64, 128, 256], []
        for i, o in zip(chans, chans[1:]):
            layers += [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(256, n))

    def forward(self, x):
        return self.head(self.features(x))


def loader(path, tf, bs, train):
    ds = datasets.ImageFolder(path, tf)
    sampler = DistributedSampler(ds, shuffle=train)
    return DataLoader(ds, bs, sampler=sampler, num_workers=4, pin_memory=True, drop_last=train), sampler, len(ds.classes)


def train(model, dl, opt, crit, dev):
    model.train()
    for x, y in dl:
        loss = crit(model(x.to(dev)), y.to(dev))
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
    return loss.item()


def validate(model, dl, dev):
    stat = torch.zeros(2, device=dev)
    with torch.no_grad():
        for x, y in dl:
            pred = model(x.to(dev)).argmax(1)
            stat[0] += (pred == y.to(dev)).sum()
            stat[1] += len(y)
    dist.all_reduce(stat)
    return (stat[0] / stat[1]).item()


def main():
    dist.init_process_group("nccl")
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dev = torch.device("cuda", local)
    torch.manual_seed(100 + rank)
    aug = transforms.Compose([transforms.RandomResizedCrop(128), transforms.RandomHorizontalFlip(), transforms.ToTensor()])
    plain = transforms.Compose([transforms.Resize(144), transforms.CenterCrop(128), transforms.ToTensor()])
    tr, sampler, n = loader("plants/train", aug, 64, True)
    va, _, _ = loader("plants/val", plain, 64, False)
    model = DDP(PlantNet(n).to(dev), device_ids=[local])
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 60)
    crit = nn.CrossEntropyLoss()
    best = 0.0
    for epoch in range(60):
        sampler.set_epoch(epoch)
        last = train(model, tr, opt, crit, dev)
        sched.step()
        acc = validate(model, va, dev)
        if rank == 0:
            print(f"{epoch} last loss {last:.4f} val acc {acc:.4f}")
            if acc > best:
                best = acc
                torch.save(model.module.state_dict(), "plants.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
