import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch.utils.data import DataLoader

from views import PairDataset


def mlp(i, h, o):
    return nn.Sequential(nn.Linear(i, h), nn.BatchNorm1d(h), nn.ReLU(inplace=True), nn.Linear(h, o))


class Online(nn.Module):
    def __init__(self, dim=256):
        super().__init__()
        net = torchvision.models.resnet18()
        net.fc = mlp(net.fc.in_features, 1024, dim)
        self.encoder = net
        self.predictor = mlp(dim, 1024, dim)

    def forward(self, x):
        return self.predictor(self.encoder(x))


def regression(p, z):
    return 2 - 2 * (F.normalize(p, dim=1) * F.normalize(z, dim=1)).sum(1)


class BYOL:
    def __init__(self, cfg, loader):
        self.cfg, self.loader = cfg, loader
        self.device = torch.device("cuda")
        self.online = Online().to(self.device)
        self.target = copy.deepcopy(self.online.encoder).requires_grad_(False)
        self.opt = torch.optim.SGD(self.online.parameters(), lr=cfg["lr"], momentum=0.9, weight_decay=1e-5)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, cfg["epochs"])
        self.total = cfg["epochs"] * len(loader)
        self.k = 0

    @torch.no_grad()
    def momentum(self):
        tau = 1 - (1 - self.cfg["tau"]) * (math.cos(math.pi * self.k / self.total) + 1) / 2
        for t, o in zip(self.target.parameters(), self.online.encoder.parameters()):
            t.lerp_(o, 1 - tau)
        self.k += 1

    def loss(self, a, b):
        with torch.no_grad():
            za, zb = self.target(a), self.target(b)
        return (regression(self.online(a), zb) + regression(self.online(b), za)).mean()

    def epoch(self, e):
        self.online.train()
        epoch_losses = []
        for a, b in self.loader:
            loss = self.loss(a.to(self.device, non_blocking=True), b.to(self.device, non_blocking=True))
            self.opt.zero_grad(set_to_none=True)
            loss.backward()
            self.opt.step()
            self.momentum()
            epoch_losses.append(loss)
        self.sched.step()
        mean = torch.stack(epoch_losses).mean().item()
        print(f"[{e:03d}] loss {mean:.4f} lr {self.sched.get_last_lr()[0]:.4f}")
        return mean

    def fit(self):
        for e in range(self.cfg["epochs"]):
            self.epoch(e)
            if (e + 1) % 20 == 0:
                torch.save(self.online.encoder.state_dict(), f"byol_{e + 1}.pt")


if __name__ == "__main__":
    torch.manual_seed(3)
    config = {"lr": 0.2, "epochs": 300, "tau": 0.99, "bs": 256}
    dl = DataLoader(PairDataset("data/stl10"), config["bs"], shuffle=True, num_workers=8, drop_last=True)
    BYOL(config, dl).fit()
