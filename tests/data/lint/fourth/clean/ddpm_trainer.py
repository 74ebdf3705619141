import copy
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, transforms, utils

from unet import Unet


def cycle(dl):
    while True:
        yield from dl


class EMA:
    def __init__(self, model, beta=0.995, warm=2000):
        self.shadow = copy.deepcopy(model).eval().requires_grad_(False)
        self.beta, self.warm, self.n = beta, warm, 0

    @torch.no_grad()
    def update(self, model):
        self.n += 1
        if self.n < self.warm:
            self.shadow.load_state_dict(model.state_dict())
            return
        for s, p in zip(self.shadow.parameters(), model.parameters()):
            s.lerp_(p, 1 - self.beta)


class Diffusion:
    def __init__(self, T, device):
        self.T, self.device = T, device
        self.beta = torch.linspace(1e-4, 0.02, T, device=device)
        self.abar = torch.cumprod(1 - self.beta, 0)

    def loss(self, model, x0):
        t = torch.randint(0, self.T, (x0.size(0),), device=self.device)
        a = self.abar[t].view(-1, 1, 1, 1)
        noise = torch.randn_like(x0)
        return F.mse_loss(model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t), noise)

    @torch.no_grad()
    def sample(self, model, shape):
        x = torch.randn(shape, device=self.device)
        for i in reversed(range(self.T)):
            t = torch.full((shape[0],), i, device=self.device)
            eps = model(x, t)
            x = (x - self.beta[i] / (1 - self.abar[i]).sqrt() * eps) / (1 - self.beta[i]).sqrt()
            if i > 0:
                x = x + self.beta[i].sqrt() * torch.randn_like(x)
        return x


class Trainer:
    def __init__(self, model, diffusion, folder, *, lr=8e-5, steps=100_000, accum=2, batch=32, save_every=1000, out="results"):
        ds = datasets.ImageFolder(folder, transforms.Compose([
            transforms.Resize(64), transforms.CenterCrop(64), transforms.ToTensor(), transforms.Normalize(0.5, 0.5)]))
        self.dl = cycle(DataLoader(ds, batch, shuffle=True, num_workers=4, pin_memory=True, drop_last=True))
        self.model, self.diffusion, self.ema = model, diffusion, EMA(model)
        self.opt = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, 0.99))
        self.scaler = torch.amp.GradScaler("cuda")
        self.steps, self.accum, self.save_every = steps, accum, save_every
        self.out = Path(out)
        self.out.mkdir(exist_ok=True)

    def _apply(self):
        self.scaler.unscale_(self.opt)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad(set_to_none=True)
        return norm

    def train(self):
        self.model.train()
        for step in range(1, self.steps + 1):
            total = 0.0
            for x, _ in islice(self.dl, self.accum):
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = self.diffusion.loss(self.model, x.cuda(non_blocking=True)) / self.accum
                total += loss.item()
                self.scaler.scale(loss).backward()
            norm = self._apply()
            self.ema.update(self.model)
            if step % 100 == 0:
                print(f"{step} loss {total:.4f} gnorm {norm.item():.3f}")
            if step % self.save_every == 0:
                imgs = self.diffusion.sample(self.ema.shadow, (16, 3, 64, 64))
                utils.save_image(imgs.clamp(-1, 1) * 0.5 + 0.5, self.out / f"{step}.png", nrow=4)
                torch.save({"model": self.model.state_dict(), "ema": self.ema.shadow.state_dict()}, self.out / "last.pt")


if __name__ == "__main__":
    net = Unet(dim=64, dim_mults=(1, 2, 4, 8)).cuda()
    Trainer(net, Diffusion(1000, "cuda"), "data/flowers").train()
