import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from sr_data import PatchPairs


def block(c):
    return nn.Sequential(nn.Conv2d(c, c, 3, 1, 1), nn.PReLU(), nn.Conv2d(c, c, 3, 1, 1))


class Upscaler(nn.Module):
    def __init__(self, c=64, n=8):
        super().__init__()
        self.head = nn.Conv2d(3, c, 9, 1, 4)
        self.body = nn.ModuleList(block(c) for _ in range(n))
        self.tail = nn.Sequential(nn.Conv2d(c, 4 * c, 3, 1, 1), nn.PixelShuffle(2), nn.PReLU(), nn.Conv2d(c, 3, 9, 1, 4))

    def forward(self, x):
        h = self.head(x)
        for b in self.body:
            h = h + b(h)
        return self.tail(h)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Conv2d(3, 64, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(64, 128, 3, 2, 1), nn.LeakyReLU(0.2),
                               nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(2048, 1))

    def forward(self, x):
        return self.f(x)


def update(loss, opt, params, scaler, max_norm):
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    norm = nn.utils.clip_grad_norm_(params, max_norm)
    scaler.step(opt)
    scaler.update()
    return norm


def psnr(g, dl, dev):
    g.eval()
    mse = n = 0
    with torch.no_grad():
        for lo, hi in dl:
            mse += F.mse_loss(g(lo.to(dev)).clamp(0, 1), hi.to(dev)).item()
            n += 1
    g.train()
    return -10 * torch.log10(torch.tensor(mse / n)).item()


def main(epochs=100):
    dev = torch.device("cuda")
    tr = DataLoader(PatchPairs("train"), 16, shuffle=True, num_workers=6, drop_last=True)
    va = DataLoader(PatchPairs("val"), 16, num_workers=2)
    G, D = Upscaler().to(dev), Critic().to(dev)
    opts = {"G": torch.optim.Adam(G.parameters(), 1e-4), "D": torch.optim.Adam(D.parameters(), 1e-4)}
    scalers = {k: torch.amp.GradScaler("cuda") for k in opts}
    for ep in range(epochs):
        for lo, hi in tr:
            lo, hi = lo.to(dev), hi.to(dev)
            with torch.autocast("cuda", dtype=torch.float16):
                sr = G(lo)
                r, f = D(hi), D(sr.detach())
                d_loss = F.softplus(-r).mean() + F.softplus(f).mean()
            update(d_loss, opts["D"], D.parameters(), scalers["D"], 1.0)
            D.requires_grad_(False)
            with torch.autocast("cuda", dtype=torch.float16):
                g_loss = F.l1_loss(sr, hi) + 1e-3 * F.softplus(-D(sr)).mean()
            update(g_loss, opts["G"], G.parameters(), scalers["G"], 1.0)
            D.requires_grad_(True)
        print(f"{ep} G {g_loss.item():.4f} D {d_loss.item():.4f} psnr {psnr(G, va, dev):.2f}")


if __name__ == "__main__":
    main()
