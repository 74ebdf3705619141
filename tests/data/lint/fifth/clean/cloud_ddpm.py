import copy
import math
import os

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from shapes import PointClouds

STEPS = 1000


def cosine_alphas(n, s=0.008):
    x = torch.linspace(0, n, n + 1)
    f = torch.cos((x / n + s) / (1 + s) * math.pi / 2) ** 2
    betas = (1 - f[1:] / f[:-1]).clamp(max=0.999)
    return torch.cumprod(1 - betas, 0)


class TimeFeatures(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.register_buffer("freq", torch.exp(torch.linspace(0, -math.log(1e4), d // 2)))

    def forward(self, t):
        a = t[:, None].float() * self.freq[None]
        return torch.cat([a.sin(), a.cos()], -1)


class SetDenoiser(nn.Module):
    def __init__(self, d=256, blocks=6):
        super().__init__()
        self.inp = nn.Linear(3, d)
        self.time = nn.Sequential(TimeFeatures(d), nn.Linear(d, d), nn.SiLU(), nn.Linear(d, d))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(d, 4, 4 * d, dropout=0.0, batch_first=True, norm_first=True) for _ in range(blocks))
        self.out = nn.Linear(d, 3)

    def forward(self, x, t):
        h = self.inp(x) + self.time(t)[:, None]
        for l in self.layers:
            h = l(h)
        return self.out(h)


class Ema:
    def __init__(self, net, rate=0.9995):
        self.rate = rate
        self.net = copy.deepcopy(net).eval().requires_grad_(False)

    @torch.no_grad()
    def track(self, live):
        for a, b in zip(self.net.parameters(), live.parameters()):
            a.lerp_(b, 1 - self.rate)


def noise_loss(net, x, abar):
    t = torch.randint(0, STEPS, (x.size(0),), device=x.device)
    a = abar[t].view(-1, 1, 1)
    eps = torch.randn_like(x)
    return (net(a.sqrt() * x + (1 - a).sqrt() * eps, t) - eps).square().mean()


@torch.no_grad()
def held_out(net, loader, abar, dev):
    losses = [noise_loss(net, x.to(dev), abar) for x in loader]
    return torch.stack(losses).mean().item()


def main():
    dev = torch.device("cuda")
    abar = cosine_alphas(STEPS).to(dev)
    net = SetDenoiser().to(dev)
    ema = Ema(net)
    opt = torch.optim.AdamW(net.parameters(), lr=2e-4, betas=(0.9, 0.99), weight_decay=0.0)
    warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: min(1.0, (i + 1) / 2000))
    train = DataLoader(PointClouds("chairs", "train"), 64, shuffle=True, drop_last=True, num_workers=4)
    test = DataLoader(PointClouds("chairs", "test"), 64)
    os.makedirs("ckpt", exist_ok=True)
    step = 0
    while step < 200_000:
        for x in train:
            loss = noise_loss(net, x.to(dev), abar)
            if not torch.isfinite(loss):
                raise FloatingPointError(f"loss is {loss.item()} at step {step}")
            opt.zero_grad(set_to_none=True)
            loss.backward()
            gnorm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            warm.step()
            ema.track(net)
            if step % 200 == 0:
                print(step, f"loss={loss.item():.4f} |g|={gnorm.item():.3f} lr={warm.get_last_lr()[0]:.2e}")
            if step % 10_000 == 0:
                print("ema test loss", held_out(ema.net, test, abar, dev))
                torch.save(ema.net.state_dict(), f"ckpt/{step:07d}.pt")
            step += 1


if __name__ == "__main__":
    main()
