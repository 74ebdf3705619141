import copy
import math
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import transforms as T
from torchvision.datasets import ImageFolder
from torchvision.utils import save_image


def cosine_betas(n, s=0.008):
    t = torch.linspace(0, n, n + 1, dtype=torch.float64) / n
    a = torch.cos((t + s) / (1 + s) * math.pi / 2) ** 2
    a = a / a[0]
    return (1 - a[1:] / a[:-1]).clamp(0, 0.999).float()


class Denoiser(nn.Module):
    def __init__(self, ch=96):
        super().__init__()
        self.t = nn.Sequential(nn.Linear(1, ch), nn.SiLU(), nn.Linear(ch, ch))
        self.inp = nn.Conv2d(3, ch, 3, padding=1)
        self.mid = nn.ModuleList([nn.Sequential(nn.GroupNorm(8, ch), nn.SiLU(), nn.Conv2d(ch, ch, 3, padding=1)) for _ in range(6)])
        self.out = nn.Conv2d(ch, 3, 3, padding=1)

    def forward(self, x, t):
        e = self.t(t[:, None])[:, :, None, None]
        h = self.inp(x)
        for m in self.mid:
            h = h + m(h + e)
        return self.out(h)


class EMA:
    def __init__(self, model, decay=0.9995, start=2000):
        self.shadow = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay, self.start, self.n = decay, start, 0

    @torch.no_grad()
    def update(self, model):
        self.n += 1
        d = 0.0 if self.n < self.start else self.decay
        for s, p in zip(self.shadow.parameters(), model.parameters()):
            s.lerp_(p, 1 - d)


class DiffusionTrainer:
    def __init__(self, folder, steps=200_000, accum=2, bs=32, device="cuda"):
        self.device, self.steps, self.accum = device, steps, accum
        tf = T.Compose([T.Resize(64), T.RandomHorizontalFlip(), T.CenterCrop(64), T.ToTensor(), T.Lambda(lambda v: v * 2 - 1)])
        self.dl = DataLoader(ImageFolder(folder, tf), bs, shuffle=True, num_workers=4, drop_last=True)
        self.model = Denoiser().to(device)
        self.ema = EMA(self.model)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=8e-5, betas=(0.9, 0.99))
        self.scaler = torch.amp.GradScaler("cuda")
        self.abar = torch.cumprod(1 - cosine_betas(1000), 0).to(device)
        self.out = Path("results")
        self.out.mkdir(exist_ok=True)

    def stream(self):
        while True:
            for x, _ in self.dl:
                yield x.to(self.device)

    def p_loss(self, x):
        t = torch.randint(0, 1000, (x.size(0),), device=x.device)
        a = self.abar[t][:, None, None, None]
        noise = torch.randn_like(x)
        pred = self.model(a.sqrt() * x + (1 - a).sqrt() * noise, t / 1000)
        return F.mse_loss(pred, noise)

    def train(self):
        it = self.stream()
        for step in range(1, self.steps + 1):
            total = 0.0
            for _ in range(self.accum):
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = self.p_loss(next(it)) / self.accum
                total += loss.item()
                self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.opt)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.opt)
            self.scaler.update()
            self.opt.zero_grad()
            self.ema.update(self.model)
            if step % 1000 == 0:
                print(step, f"{total:.4f}")
                self.sample(step)

    @torch.inference_mode()
    def sample(self, step, n=16):
        x = torch.randn(n, 3, 64, 64, device=self.device)
        ts = torch.linspace(999, 0, 51, device=self.device).long()
        for cur, nxt in zip(ts[:-1], ts[1:]):
            a, b = self.abar[cur], self.abar[nxt]
            eps = self.ema.shadow(x, (cur / 1000).expand(n))
            x0 = ((x - (1 - a).sqrt() * eps) / a.sqrt()).clamp(-1, 1)
            x = b.sqrt() * x0 + (1 - b).sqrt() * eps
        save_image((x + 1) / 2, self.out / f"{step}.png", nrow=4)


if __name__ == "__main__":
    DiffusionTrainer("flowers").train()
