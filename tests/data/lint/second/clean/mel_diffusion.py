import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader
from tqdm import trange

from melset import MelSlices


def cycle(dl):
    while True:
        for b in dl:
            yield b


class TimeMLP(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.net = nn.Sequential(nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, dim))

    def forward(self, t):
        half = self.dim // 2
        f = torch.exp(-math.log(1e4) * torch.arange(half, device=t.device) / (half - 1))
        a = t[:, None].float() * f[None]
        return self.net(torch.cat([a.sin(), a.cos()], -1))


class Denoiser(nn.Module):
    def __init__(self, ch=80, dim=256, depth=6):
        super().__init__()
        self.inp, self.out = nn.Conv1d(ch, dim, 1), nn.Conv1d(dim, ch, 1)
        self.time = TimeMLP(dim)
        self.convs = nn.ModuleList(nn.Conv1d(dim, dim, 3, padding=2 ** i, dilation=2 ** i) for i in range(depth))
        self.norms = nn.ModuleList(nn.GroupNorm(8, dim) for _ in range(depth))

    def forward(self, x, t):
        h, e = self.inp(x), self.time(t)[:, :, None]
        for c, n in zip(self.convs, self.norms):
            h = h + c(F.silu(n(h) + e))
        return self.out(h)


class EMA:
    def __init__(self, model, decay=0.995, start=2000):
        self.decay, self.start = decay, start
        self.shadow = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, model, step):
        d = 0.0 if step < self.start else self.decay
        for s, p in zip(self.shadow.parameters(), model.parameters()):
            s.lerp_(p, 1 - d)


class DiffusionTrainer:
    def __init__(self, model, folder, steps=200_000, accum=2, lr=8e-5, T=1000):
        self.acc = Accelerator(mixed_precision="fp16")
        self.T, self.steps, self.accum = T, steps, accum
        betas = torch.linspace(1e-4, 0.02, T)
        self.abar = torch.cumprod(1 - betas, 0).to(self.acc.device)
        dl = DataLoader(MelSlices(folder, frames=128), 32, shuffle=True, drop_last=True, num_workers=4)
        self.ema = EMA(model.to(self.acc.device))
        opt = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, 0.99))
        self.model, self.opt, dl = self.acc.prepare(model, opt, dl)
        self.data = cycle(dl)

    def loss(self, x):
        t = torch.randint(0, self.T, (x.size(0),), device=x.device)
        eps = torch.randn_like(x)
        a = self.abar[t][:, None, None]
        with self.acc.autocast():
            pred = self.model(a.sqrt() * x + (1 - a).sqrt() * eps, t)
        return F.mse_loss(pred.float(), eps)

    def fit(self):
        self.model.train()
        for step in trange(self.steps, disable=not self.acc.is_main_process):
            total = 0.0
            for _ in range(self.accum):
                loss = self.loss(next(self.data)) / self.accum
                total += loss.item()
                self.acc.backward(loss)
            self.acc.clip_grad_norm_(self.model.parameters(), 1.0)
            self.opt.step()
            self.opt.zero_grad()
            self.acc.wait_for_everyone()
            if self.acc.is_main_process:
                self.ema.update(self.acc.unwrap_model(self.model), step)
                if step % 1000 == 0:
                    print(f"step {step} loss {total:.4f}")
                    torch.save(self.ema.shadow.state_dict(), "mel_diffusion.pt")


if __name__ == "__main__":
    DiffusionTrainer(Denoiser(), "mels/").fit()
