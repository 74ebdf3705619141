"""Unpaired image translation with two generators and two critics."""
import itertools
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from unpaired import TwoFolders

dev = torch.device("cuda")


def blk(i, o, s):
    return [nn.Conv2d(i, o, 4 if s == 2 else 3, s, 1), nn.InstanceNorm2d(o), nn.LeakyReLU(0.2, True)]


class Translator(nn.Module):
    def __init__(self, c=48):
        super().__init__()
        self.down = nn.Sequential(*blk(3, c, 2), *blk(c, 2 * c, 2))
        self.mid = nn.ModuleList(nn.Sequential(*blk(2 * c, 2 * c, 1), *blk(2 * c, 2 * c, 1)) for _ in range(5))
        self.up = nn.Sequential(nn.ConvTranspose2d(2 * c, c, 4, 2, 1), nn.InstanceNorm2d(c), nn.ReLU(True),
                                nn.ConvTranspose2d(c, 3, 4, 2, 1), nn.Tanh())

    def forward(self, x):
        h = self.down(x)
        for m in self.mid:
            h = h + m(h)
        return self.up(h)


def judge(c=48):
    return nn.Sequential(*blk(3, c, 2), *blk(c, 2 * c, 2), *blk(2 * c, 4 * c, 2), nn.Conv2d(4 * c, 1, 4))


class Pool:
    def __init__(self, n=50):
        self.n, self.items = n, []

    def swap(self, x):
        if len(self.items) < self.n:
            self.items.append(x)
            return x
        if random.random() < 0.5:
            i = random.randrange(self.n)
            x, self.items[i] = self.items[i], x
        return x


def lsgan(out, target):
    return F.mse_loss(out, torch.full_like(out, target))


def main(epochs=100, cyc=10.0):
    torch.manual_seed(0)
    ab, ba = Translator().to(dev), Translator().to(dev)
    da, db = judge().to(dev), judge().to(dev)
    opt_g = torch.optim.Adam(itertools.chain(ab.parameters(), ab.parameters()), lr=2e-4, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(itertools.chain(da.parameters(), db.parameters()), lr=2e-4, betas=(0.5, 0.999))
    linear = lambda e: 1.0 - max(0, e - epochs // 2) / (epochs // 2 + 1)
    scheds = [torch.optim.lr_scheduler.LambdaLR(o, linear) for o in (opt_g, opt_d)]
    pa, pb = Pool(), Pool()
    data = DataLoader(TwoFolders("horses", "zebras"), 1, shuffle=True, num_workers=4)
    for ep in range(epochs):
        log = {"g": 0.0, "d": 0.0}
        for a, b in data:
            a, b = a.to(dev), b.to(dev)
            fb, fa = ab(a), ba(b)
            adv = lsgan(db(fb), 1.0) + lsgan(da(fa), 1.0)
            cycle = F.l1_loss(ba(fb), a) + F.l1_loss(ab(fa), b)
            g = adv + cyc * cycle
            opt_g.zero_grad()
            g.backward()
            opt_g.step()

            old_a, old_b = pa.swap(fa.detach()), pb.swap(fb.detach())
            d = 0.5 * (lsgan(da(a), 1.0) + lsgan(da(old_a), 0.0) + lsgan(db(b), 1.0) + lsgan(db(old_b), 0.0))
            opt_d.zero_grad()
            d.backward()
            opt_d.step()
            log["g"] += g.item() / len(data)
            log["d"] += d.item() / len(data)
        for s in scheds:
            s.step()
        print(ep, log)
        torch.save({"ab": ab.state_dict(), "ba": ba.state_dict()}, "translators.pt")


if __name__ == "__main__":
    main()
