"""Improved Wasserstein GAN for 32x32 sprites."""
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Cfg:
    z: int = 128
    critic_iters: int = 5
    lam: float = 10.0
    lr: float = 1e-4
    steps: int = 40000
    batch: int = 64


def cycle(dl):
    while True:
        for (x,) in dl:
            yield x


class Gen(nn.Module):
    def __init__(self, z):
        super().__init__()
        self.fc = nn.Linear(z, 256 * 4 * 4)
        self.net = nn.Sequential(
            nn.BatchNorm2d(256), nn.ReLU(),
            nn.ConvTranspose2d(256, 128, 4, 2, 1), nn.BatchNorm2d(128), nn.ReLU(),
            nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh())

    def forward(self, z):
        return self.net(self.fc(z).view(-1, 256, 4, 4))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(64, 128, 4, 2, 1), nn.GroupNorm(8, 128), nn.LeakyReLU(0.2),
            nn.Conv2d(128, 256, 4, 2, 1), nn.GroupNorm(8, 256), nn.LeakyReLU(0.2),
            nn.Flatten(), nn.Linear(256 * 16, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


def penalty(critic, real, fake):
    eps = torch.rand(real.size(0), 1, 1, 1, device=real.device)
    mix = (eps * real + (1 - eps) * fake).requires_grad_(True)
    score = critic(mix)
    (grad,) = torch.autograd.grad(score.sum(), mix, create_graph=True, retain_graph=True)
    return ((grad.flatten(1).norm(2, dim=1) - 1) ** 2).mean()


def train(cfg, images, device):
    data = cycle(DataLoader(TensorDataset(images), cfg.batch, shuffle=True, drop_last=True))
    gen, critic = Gen(cfg.z).to(device), Critic().to(device)
    opts = {
        "gen": torch.optim.Adam(gen.parameters(), cfg.lr, betas=(0.0, 0.9)),
        "critic": torch.optim.Adam(critic.parameters(), cfg.lr, betas=(0.0, 0.9)),
    }
    for step in range(cfg.steps):
        for real in islice(data, cfg.critic_iters):
            real = real.to(device)
            with torch.no_grad():
                fake = gen(torch.randn(real.size(0), cfg.z, device=device))
            w = critic(fake).mean() - critic(real).mean()
            loss_c = w + cfg.lam * penalty(critic, real, fake)
            opts["critic"].zero_grad()
            loss_c.backward()
            opts["critic"].step()

        critic.requires_grad_(False)
        loss_g = -critic(gen(torch.randn(cfg.batch, cfg.z, device=device))).mean()
        opts["gen"].zero_grad()
        loss_g.backward()
        opts["gen"].step()
        critic.requires_grad_(True)

        if step % 200 == 0:
            print(f"{step:6d} W {-w.item():.3f} G {loss_g.item():.3f}")
    torch.save(gen.state_dict(), "sprites_gen.pt")


if __name__ == "__main__":
    dev = "cuda" if torch.cuda.is_available() else "cpu"
    train(Cfg(), torch.load("sprites.pt"), dev)
