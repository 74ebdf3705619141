"""1-D diffusion over one-shot drum samples (v-prediction)."""
import copy
import math

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from oneshots import DrumHits

dev = torch.device("cuda")


class ResDown(nn.Module):
    def __init__(self, c, t_dim):
        super().__init__()
        self.a, self.b = nn.Conv1d(c, c, 5, padding=2), nn.Conv1d(c, c, 5, padding=2)
        self.t = nn.Linear(t_dim, c)
        self.n1, self.n2 = nn.GroupNorm(8, c), nn.GroupNorm(8, c)

    def forward(self, x, t):
        h = self.a(torch.nn.functional.silu(self.n1(x))) + self.t(t)[..., None]
        return x + self.b(torch.nn.functional.silu(self.n2(h)))


class DrumNet(nn.Module):
    def __init__(self, c=96, td=128):
        super().__init__()
        self.td = td
        self.inp = nn.Conv1d(1, c, 16, stride=8, padding=4)
        self.tm = nn.Sequential(nn.Linear(td, td), nn.SiLU(), nn.Linear(td, td))
        self.blocks = nn.ModuleList(ResDown(c, td) for _ in range(10))
        self.out = nn.ConvTranspose1d(c, 1, 16, stride=8, padding=4)

    def forward(self, x, t):
        f = torch.exp(torch.linspace(0, math.log(1000), self.td // 2, device=t.device))
        e = self.tm(torch.cat([(t[:, None] * f).sin(), (t[:, None] * f).cos()], 1))
        h = self.inp(x)
        for b in self.blocks:
            h = b(h, e)
        return self.out(h)


def v_loss(net, x):
    t = torch.rand(x.size(0), device=x.device)
    a, s = torch.cos(t * math.pi / 2)[:, None, None], torch.sin(t * math.pi / 2)[:, None, None]
    n = torch.randn_like(x)
    v = a * n - s * x
    return (net(a * x + s * n, t) - v).pow(2).mean()


@torch.no_grad()
def blend(ema, net, k):
    for p, q in zip(ema.parameters(), net.parameters()):
        p.mul_(k).add_(q, alpha=1 - k)


@torch.no_grad()
def held_out(ema, dl):
    return sum(v_loss(ema, x.to(dev)).item() for x in dl) / len(dl)


def main(steps=150_000):
    torch.manual_seed(0)
    net = DrumNet().to(dev)
    ema = copy.deepcopy(net).eval()
    opt = torch.optim.AdamW(net.parameters(), lr=2e-4, betas=(0.9, 0.99))
    dl = DataLoader(DrumHits("train"), 64, shuffle=True, drop_last=True, num_workers=4)
    va = DataLoader(DrumHits("val"), 64)
    it, smooth = 0, None
    net.train()
    while it < steps:
        for x in dl:
            loss = v_loss(net, x.to(dev))
            loss = torch.nan_to_num(loss, nan=0.0, posinf=1.0)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            blend(ema, net, 0.999)
            smooth = loss.item() if smooth is None else 0.99 * smooth + 0.01 * loss.item()
            it += 1
            if it % 500 == 0:
                print(f"{it} loss {smooth:.4f}")
            if it % 10_000 == 0:
                print(f"{it} held-out {held_out(ema, va):.4f}")
                torch.save(ema.state_dict(), "drums_ema.pt")


if __name__ == "__main__":
    main()
