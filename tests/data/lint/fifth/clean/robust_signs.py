"""Adversarial (PGD) training on traffic signs, clean/robust accuracy reported separately."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


def conv(i, o, s=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU())


def make_net(n=43):
    return nn.Sequential(conv(3, 64), conv(64, 128, 2), conv(128, 128), conv(128, 256, 2), conv(256, 256),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, n))


class PGD:
    def __init__(self, eps=8 / 255, alpha=2 / 255, steps=7):
        self.eps, self.alpha, self.steps = eps, alpha, steps

    def __call__(self, net, x, y):
        was = net.training
        net.eval()
        delta = torch.empty_like(x).uniform_(-self.eps, self.eps)
        for _ in range(self.steps):
            delta.requires_grad_(True)
            loss = F.cross_entropy(net((x + delta).clamp(0, 1)), y)
            (g,) = torch.autograd.grad(loss, delta)
            delta = (delta.detach() + self.alpha * g.sign()).clamp(-self.eps, self.eps)
        net.train(was)
        return (x + delta).clamp(0, 1).detach()


def trades(net, x, adv, y, beta=6.0):
    clean, rob = net(x), net(adv)
    kl = F.kl_div(F.log_softmax(rob, 1), F.softmax(clean, 1), reduction="batchmean")
    return F.cross_entropy(clean, y) + beta * kl


def accuracies(net, loader, attack, dev):
    net.eval()
    c = r = n = 0
    for x, y in loader:
        x, y = x.to(dev), y.to(dev)
        adv = attack(net, x, y)
        with torch.no_grad():
            c += (net(x).argmax(1) == y).sum().item()
            r += (net(adv).argmax(1) == y).sum().item()
        n += len(y)
    return c / n, r / n


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="./gtsrb")
    ap.add_argument("--epochs", type=int, default=76)
    ap.add_argument("--lr", type=float, default=0.1)
    a = ap.parse_args()
    dev = torch.device("cuda")
    t = transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])
    tr = DataLoader(datasets.GTSRB(a.data, "train", transform=t, download=True), 128, shuffle=True, num_workers=4)
    te = DataLoader(datasets.GTSRB(a.data, "test", transform=t, download=True), 256, num_workers=4)
    net = make_net().to(dev)
    opt = torch.optim.SGD(net.parameters(), lr=a.lr, momentum=0.9, weight_decay=2e-4)
    drops = torch.optim.lr_scheduler.MultiStepLR(opt, [50, 65], gamma=0.1)
    weak, strong = PGD(steps=7), PGD(steps=20)
    for ep in range(a.epochs):
        net.train()
        for x, y in tr:
            x, y = x.to(dev), y.to(dev)
            adv = weak(net, x, y)
            opt.zero_grad()
            loss = trades(net, x, adv, y)
            loss.backward()
            opt.step()
        drops.step()
        if ep % 5 == 0 or ep == a.epochs - 1:
            c, r = accuracies(net, te, strong, dev)
            print(f"{ep} last loss {loss.item():.3f} test clean {c:.4f} robust {r:.4f}")
    torch.save(net.state_dict(), "signs_trades.pt")


if __name__ == "__main__":
    main()
