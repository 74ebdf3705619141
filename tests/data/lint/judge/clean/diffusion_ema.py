import copy

import torch
import torch.nn.functional as F
from tqdm import tqdm


class EMA:
    def __init__(self, model, decay=0.9999):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for a, b in zip(self.model.parameters(), model.parameters()):
            a.lerp_(b, 1 - self.decay)


class Diffusion:
    def __init__(self, steps=1000):
        self.steps = steps
        self.alpha_bar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, steps), 0)

    def noise(self, x, t):
        a = self.alpha_bar.to(x)[t].view(-1, 1, 1, 1)
        eps = torch.randn_like(x)
        return a.sqrt() * x + (1 - a).sqrt() * eps, eps

    @torch.no_grad()
    def sample(self, model, n):
        x = torch.randn(n, 3, 32, 32)
        for i in reversed(range(self.steps)):
            t = torch.full((n,), i)
            x = x - 0.01 * model(x, t)
        return x


def main(unet, dataloader, epochs=100, device="cuda"):
    model = unet.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    ema, diffusion = EMA(model), Diffusion()
    mse = torch.nn.MSELoss()
    for epoch in range(epochs):
        for images, _ in tqdm(dataloader):
            images = images.to(device)
            t = torch.randint(1, diffusion.steps, (len(images),), device=device)
            x_t, noise = diffusion.noise(images, t)
            loss = mse(noise, model(x_t, t))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            ema.update(model)
        if epoch % 10 == 0:
            save(diffusion.sample(ema.model, 8))
            torch.save(ema.model.state_dict(), "ema.pt")
