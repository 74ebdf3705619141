"""Wide-ish residual network on CIFAR-10, SGD with a step schedule."""
import argparse
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.261)


class Block(nn.Module):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(cin)
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.short = nn.Identity() if cin == cout and stride == 1 else nn.Conv2d(cin, cout, 1, stride, bias=False)

    def forward(self, x):
        h = F.relu(self.bn1(x))
        out = self.conv2(F.relu(self.bn2(self.conv1(h))))
        return out + self.short(h if not isinstance(self.short, nn.Identity) else x)


class Net(nn.Module):
    def __init__(self, width=64, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.body = nn.Sequential(Block(width, width), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2))
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x):
        x = F.relu(self.body(self.stem(x)))
        return self.head(x.mean(dim=(2, 3)))


def loaders(root, bs):
    aug = transforms.Compose([transforms.RandomCrop(32, 4), transforms.RandomHorizontalFlip(),
                              transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    plain = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    tr = datasets.CIFAR10(root, True, transform=aug, download=True)
    te = datasets.CIFAR10(root, False, transform=plain, download=True)
    return DataLoader(tr, bs, shuffle=True, num_workers=4, drop_last=True), DataLoader(te, 512, num_workers=4)


@torch.no_grad()
def accuracy(model, loader, device):
    model.eval()
    good = n = 0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        probs = model(x).softmax(dim=-1)
        good += (probs.argmax(-1) == y).sum().item()
        n += y.numel()
    return good / n


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--data", default="./data")
    p.add_argument("--epochs", type=int, default=90)
    p.add_argument("--lr", type=float, default=0.1)
    p.add_argument("--bs", type=int, default=128)
    p.add_argument("--seed", type=int, default=0)
    a = p.parse_args()
    random.seed(a.seed)
    np.random.seed(a.seed)
    torch.manual_seed(a.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_dl, test_dl = loaders(a.data, a.bs)
    net = Net().to(device)
    opt = torch.optim.SGD(net.parameters(), lr=a.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, milestones=[30, 60, 80], gamma=0.2)
    crit = nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in range(a.epochs):
        net.train()
        run = 0.0
        for x, y in train_dl:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            loss = crit(net(x), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            run += loss.item()
        sched.step()
        print(f"epoch {epoch:3d} loss {run / len(train_dl):.4f} test acc {accuracy(net, test_dl, device):.4f}")
    torch.save(net.state_dict(), "wrn.pt")


if __name__ == "__main__":
    main()
