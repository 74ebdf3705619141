"""Patch GAN that synthesises seamless textures."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import transforms as T
from torchvision.datasets import ImageFolder
from torchvision.utils import save_image


def up(i, o):
    return nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(i, o, 5, padding=2, padding_mode="circular"),
                         nn.BatchNorm2d(o), nn.ReLU(True))


class Weaver(nn.Module):
    def __init__(self, z=32):
        super().__init__()
        self.f = nn.Sequential(up(z, 256), up(256, 128), up(128, 64), up(64, 32), nn.Conv2d(32, 3, 3, padding=1), nn.Tanh())

    def forward(self, z):
        return self.f(z)


class PatchCritic(nn.Module):
    def __init__(self):
        super().__init__()
        c, layers = 3, []
        for o in (64, 128, 256):
            layers += [nn.utils.spectral_norm(nn.Conv2d(c, o, 4, 2, 1)), nn.LeakyReLU(0.2, True)]
            c = o
        self.f = nn.Sequential(*layers, nn.Conv2d(c, 1, 4))

    def forward(self, x):
        return self.f(x)


def bce(logits, value):
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, value))


class TextureTrainer:
    def __init__(self, args):
        self.dev = torch.device("cuda")
        self.args = args
        self.G, self.D = Weaver().to(self.dev), PatchCritic().to(self.dev)
        self.og = torch.optim.Adam(self.G.parameters(), lr=2e-4, betas=(0.5, 0.999))
        self.od = torch.optim.Adam(self.D.parameters(), lr=2e-4, betas=(0.5, 0.999))

    def noise(self, n):
        return torch.randn(n, 32, 8, 8, device=self.dev)

    def critic_turn(self, real):
        fake = self.G(self.noise(real.size(0))).detach()
        loss = bce(self.D(real), 0.9) + bce(self.D(fake), 0.0)
        loss.backward()
        self.od.step()
        return loss.item()

    def weaver_turn(self, n):
        self.D.requires_grad_(False)
        loss = bce(self.D(self.G(self.noise(n))), 1.0)
        self.og.zero_grad()
        loss.backward()
        self.og.step()
        self.D.requires_grad_(True)
        return loss.item()

    def fit(self, loader):
        fixed = self.noise(16)
        for ep in range(self.args.epochs):
            self.G.train()
            d = g = 0.0
            for real, _ in loader:
                d += self.critic_turn(real.to(self.dev))
                g += self.weaver_turn(real.size(0))
            print(f"{ep} D {d / len(loader):.3f} G {g / len(loader):.3f}")
            self.G.eval()
            with torch.no_grad():
                save_image(self.G(fixed) * 0.5 + 0.5, f"tex_{ep:03d}.png", nrow=4)
        torch.save(self.G.state_dict(), "weaver.pt")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("folder")
    ap.add_argument("--epochs", type=int, default=80)
    a = ap.parse_args()
    t = T.Compose([T.RandomCrop(128, pad_if_needed=True), T.ToTensor(), T.Normalize([0.5] * 3, [0.5] * 3)])
    TextureTrainer(a).fit(DataLoader(ImageFolder(a.folder, t), 32, shuffle=True, drop_last=True, num_workers=4))
