import argparse
import sys

import torch
from torch import nn, optim
from sklearn.datasets import make_moons


class Coupling(nn.Module):
    def __init__(self, dim, hidden, flip):
        super().__init__()
        self.flip, self.half = flip, dim // 2
        self.st = nn.Sequential(nn.Linear(self.half, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(),
                                nn.Linear(hidden, 2 * (dim - self.half)))
        nn.init.zeros_(self.st[-1].weight)
        nn.init.zeros_(self.st[-1].bias)

    def forward(self, x):
        a, b = x.split([self.half, x.size(1) - self.half], 1)
        if self.flip:
            a, b = b, a
        s, t = self.st(a).chunk(2, 1)
        s = torch.tanh(s)
        b = b * s.exp() + t
        return torch.cat([b, a] if self.flip else [a, b], 1), s.sum(1)

    def inverse(self, z):
        a, b = z.split([self.half, z.size(1) - self.half], 1)
        if self.flip:
            a, b = b, a
        s, t = self.st(a).chunk(2, 1)
        b = (b - t) * (-torch.tanh(s)).exp()
        return torch.cat([b, a] if self.flip else [a, b], 1)


class Flow(nn.Module):
    def __init__(self, dim=2, n=8, hidden=64):
        super().__init__()
        self.layers = nn.ModuleList(Coupling(dim, hidden, i % 2 == 1) for i in range(n))
        self.register_buffer("loc", torch.zeros(dim))

    def log_prob(self, x):
        ld = 0.0
        for l in self.layers:
            x, d = l(x)
            ld = ld + d
        base = torch.distributions.Normal(self.loc, 1.0)
        return base.log_prob(x).sum(1) + ld

    @torch.no_grad()
    def sample(self, n):
        z = torch.randn(n, self.loc.numel(), device=self.loc.device)
        for l in reversed(self.layers):
            z = l.inverse(z)
        return z


def moons(n):
    return torch.tensor(make_moons(n, noise=0.05)[0], dtype=torch.float32)


def main(argv=None):
    p = argparse.ArgumentParser()
    p.add_argument("--iters", type=int, default=10000)
    p.add_argument("--batch", type=int, default=512)
    p.add_argument("--lr", type=float, default=1e-3)
    a = p.parse_args(argv)
    torch.manual_seed(0)
    flow = Flow()
    averaged = optim.swa_utils.AveragedModel(flow, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.999))
    opt = optim.Adam(flow.parameters(), lr=a.lr)
    sched = optim.lr_scheduler.CosineAnnealingLR(opt, T_max=a.iters)
    held_out = moons(5000)
    smooth = None
    for i in range(1, a.iters + 1):
        nll = -flow.log_prob(moons(a.batch)).mean()
        if not torch.isfinite(nll):
            sys.exit(f"non-finite loss at {i}")
        nll.backward()
        nn.utils.clip_grad_norm_(flow.parameters(), 5.0)
        opt.step()
        sched.step()
        opt.zero_grad()
        averaged.update_parameters(flow)
        smooth = nll.item() if smooth is None else 0.98 * smooth + 0.02 * nll.item()
        if i % 500 == 0:
            averaged.eval()
            with torch.no_grad():
                test = -averaged.module.log_prob(held_out).mean()
            print(f"{i:6d} train {smooth:.4f} held-out {test:.4f}")
    torch.save(averaged.module.state_dict(), "flow.pt")


if __name__ == "__main__":
    main()
