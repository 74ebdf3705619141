import argparse
import os

import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms
from torchvision.utils import save_image


class Gen(nn.Module):
    def __init__(self, z, classes=10):
        super().__init__()
        self.lab = nn.Embedding(classes, classes)
        self.net = nn.Sequential(
            nn.Linear(z + classes, 256), nn.BatchNorm1d(256), nn.LeakyReLU(0.2),
            nn.Linear(256, 512), nn.BatchNorm1d(512), nn.LeakyReLU(0.2), nn.Linear(512, 784), nn.Tanh())

    def forward(self, z, y):
        return self.net(torch.cat([z, self.lab(y)], 1)).view(-1, 1, 28, 28)


class Disc(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.lab = nn.Embedding(classes, classes)
        self.net = nn.Sequential(
            nn.Linear(784 + classes, 512), nn.LeakyReLU(0.2), nn.Dropout(0.3),
            nn.Linear(512, 256), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(256, 1))

    def forward(self, x, y):
        return self.net(torch.cat([x.flatten(1), self.lab(y)], 1))


class CGAN:
    def __init__(self, z, lr, device):
        self.z, self.device = z, device
        self.nets = nn.ModuleDict({"g": Gen(z), "d": Disc()}).to(device)
        self.opts = {
            "g": torch.optim.Adam(self.nets["g"].parameters(), lr=lr, betas=(0.5, 0.999)),
            "d": torch.optim.Adam(self.nets["g"].parameters(), lr=lr, betas=(0.5, 0.999)),
        }
        self.bce = nn.BCEWithLogitsLoss()

    def fake(self, y):
        return self.nets["g"](torch.randn(len(y), self.z, device=self.device), y)

    def adv(self, logits, real):
        return self.bce(logits, torch.full_like(logits, 0.9 if real else 0.0))

    def d_step(self, x, y):
        self.nets["d"].zero_grad()
        loss = self.adv(self.nets["d"](x, y), True) + self.adv(self.nets["d"](self.fake(y).detach(), y), False)
        loss.backward()
        self.opts["d"].step()
        return loss.item()

    def g_step(self, n):
        self.nets["g"].zero_grad()
        y = torch.randint(0, 10, (n,), device=self.device)
        loss = self.adv(self.nets["d"](self.fake(y), y), True)
        loss.backward()
        self.opts["g"].step()
        return loss.item()

    @torch.no_grad()
    def grid(self, path):
        self.nets["g"].eval()
        save_image(self.fake(torch.arange(10, device=self.device).repeat(10)), path, nrow=10, normalize=True)
        self.nets["g"].train()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=50)
    ap.add_argument("--out", default="cgan_out")
    args = ap.parse_args()
    os.makedirs(args.out, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tf = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    dl = DataLoader(datasets.MNIST("data", download=True, transform=tf), 128, shuffle=True, drop_last=True)
    gan = CGAN(64, 2e-4, device)
    for e in range(args.epochs):
        d = g = 0.0
        for x, y in dl:
            x, y = x.to(device), y.to(device)
            d += gan.d_step(x, y)
            g += gan.g_step(len(x))
        print(f"{e}: d {d / len(dl):.3f} g {g / len(dl):.3f}")
        gan.grid(os.path.join(args.out, f"{e:03d}.png"))


if __name__ == "__main__":
    main()
