import copy
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Config:
    latents: str = "latents.pt"
    epochs: int = 100
    batch: int = 64
    lr: float = 1e-4
    ema: float = 0.999
    clip: float = 1.0
    p_uncond: float = 0.1


class FiLMBlock(nn.Module):
    def __init__(self, c, e):
        super().__init__()
        self.norm, self.conv1, self.conv2 = nn.GroupNorm(8, c), nn.Conv2d(c, c, 3, 1, 1), nn.Conv2d(c, c, 3, 1, 1)
        self.film = nn.Linear(e, 2 * c)

    def forward(self, x, e):
        s, b = self.film(e)[:, :, None, None].chunk(2, 1)
        h = self.conv1(F.silu(self.norm(x) * (1 + s) + b))
        return x + self.conv2(F.silu(h))


class VelocityNet(nn.Module):
    def __init__(self, c_in=4, c=128, classes=10, depth=8):
        super().__init__()
        self.cls = nn.Embedding(classes + 1, c)
        self.time = nn.Sequential(nn.Linear(1, c), nn.SiLU(), nn.Linear(c, c))
        self.inp, self.out = nn.Conv2d(c_in, c, 3, 1, 1), nn.Conv2d(c, c_in, 3, 1, 1)
        self.blocks = nn.ModuleList(FiLMBlock(c, c) for _ in range(depth))

    def forward(self, x, t, y):
        e = self.time(t[:, None]) + self.cls(y)
        h = self.inp(x)
        for b in self.blocks:
            h = b(h, e)
        return self.out(h)


def flow_matching_loss(model, x1, y, p_uncond, null):
    x0 = torch.randn_like(x1)
    t = torch.rand(len(x1), device=x1.device)
    tt = t[:, None, None, None]
    y = torch.where(torch.rand(len(y), device=y.device) < p_uncond, torch.full_like(y, null), y)
    return F.mse_loss(model((1 - tt) * x0 + tt * x1, t, y), x1 - x0)


def train(cfg: Config):
    device = "cuda"
    blob = torch.load(cfg.latents)
    dl = DataLoader(TensorDataset(blob["z"], blob["y"]), cfg.batch, shuffle=True, drop_last=True)
    model = VelocityNet().to(device)
    ema = copy.deepcopy(model).requires_grad_(False).eval()
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.99))
    scaler = torch.amp.GradScaler("cuda")
    step = 0
    for epoch in range(cfg.epochs):
        for z, y in dl:
            z, y = z.to(device), y.to(device)
            opt.zero_grad(set_to_none=True)
            with torch.amp.autocast("cuda", dtype=torch.bfloat16):
                loss = flow_matching_loss(model, z, y, cfg.p_uncond, 10)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
            scaler.step(opt)
            scaler.update()
            with torch.no_grad():
                for e, p in zip(ema.parameters(), model.parameters()):
                    e.lerp_(p, 1 - cfg.ema)
            step += 1
            if step % 200 == 0:
                print(f"{step}: {loss.item():.4f}")
        torch.save(ema.state_dict(), "flow_ema.pt")


if __name__ == "__main__":
    train(Config())
