import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from unet import UNet
from datasets_local import Flowers

STEPS, LR, TOTAL = 1000, 1e-4, 200_000


class NoiseSchedule:
    def __init__(self, device):
        beta = torch.linspace(1e-4, 0.02, STEPS, device=device)
        self.beta = beta
        self.alpha_bar = torch.cumprod(1 - beta, 0)

    def add_noise(self, x0, noise, t):
        a = self.alpha_bar[t].view(-1, 1, 1, 1)
        return a.sqrt() * x0 + (1 - a).sqrt() * noise


@torch.no_grad()
def sample(model, sched, n, device):
    model.eval()
    x = torch.randn(n, 3, 64, 64, device=device)
    for t in reversed(range(STEPS)):
        eps = model(x, torch.full((n,), t, device=device))
        b, ab = sched.beta[t], sched.alpha_bar[t]
        x = (x - b / (1 - ab).sqrt() * eps) / (1 - b).sqrt()
        if t > 0:
            x = x + b.sqrt() * torch.randn_like(x)
    return x.clamp(-1, 1)


def infinite(loader):
    while True:
        yield from loader


def main():
    device = "cuda"
    model = UNet(channels=128).to(device)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9999))
    opt = torch.optim.Adam(model.parameters(), lr=LR)
    warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 5000))
    noise_schedule = NoiseSchedule(device)
    batches = infinite(DataLoader(Flowers(64), 64, shuffle=True, num_workers=8, drop_last=True))
    model.train()
    for step in range(TOTAL):
        x0 = next(batches).to(device)
        t = torch.randint(0, STEPS, (x0.size(0),), device=device)
        noise = torch.randn_like(x0)
        pred = model(noise_schedule.add_noise(x0, noise, t), t)
        loss = F.mse_loss(pred, noise)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        warm.step()
        ema.update_parameters(model)
        if step % 10_000 == 0:
            print(step, loss.item())
            torch.save(sample(ema, noise_schedule, 16, device), f"samples_{step}.pt")


if __name__ == "__main__":
    main()
