import itertools
import random

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from unpaired import UnpairedImages


class Res(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.f = nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(c, c, 3), nn.InstanceNorm2d(c), nn.ReLU(True),
                               nn.ReflectionPad2d(1), nn.Conv2d(c, c, 3), nn.InstanceNorm2d(c))

    def forward(self, x):
        return x + self.f(x)


def make_gen(c=48, n=6):
    return nn.Sequential(nn.Conv2d(3, c, 7, 1, 3), nn.ReLU(True), nn.Conv2d(c, 2 * c, 3, 2, 1), nn.ReLU(True),
                         nn.Conv2d(2 * c, 4 * c, 3, 2, 1), nn.ReLU(True), *[Res(4 * c) for _ in range(n)],
                         nn.ConvTranspose2d(4 * c, 2 * c, 4, 2, 1), nn.ReLU(True),
                         nn.ConvTranspose2d(2 * c, c, 4, 2, 1), nn.ReLU(True), nn.Conv2d(c, 3, 7, 1, 3), nn.Tanh())


def make_disc(c=64):
    return nn.Sequential(nn.Conv2d(3, c, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(c, 2 * c, 4, 2, 1),
                         nn.InstanceNorm2d(2 * c), nn.LeakyReLU(0.2, True), nn.Conv2d(2 * c, 1, 4, 1, 1))


class Pool:
    def __init__(self, n=50):
        self.n, self.items = n, []

    def query(self, imgs):
        out = []
        for im in imgs.detach():
            if len(self.items) < self.n:
                self.items.append(im)
                out.append(im)
            elif random.random() > 0.5:
                k = random.randrange(self.n)
                out.append(self.items[k])
                self.items[k] = im
            else:
                out.append(im)
        return torch.stack(out)


def set_requires_grad(nets, flag):
    for n in nets:
        for p in n.parameters():
            p.requires_grad = flag


class CycleGAN:
    def __init__(self, dev, lr=2e-4, epochs=200, decay_from=100):
        self.gab, self.gba, self.da, self.db = (m.to(dev) for m in (make_gen(), make_gen(), make_disc(), make_disc()))
        self.og = torch.optim.Adam(itertools.chain(self.gab.parameters(), self.gba.parameters()), lr, betas=(0.5, 0.999))
        self.od = torch.optim.Adam(itertools.chain(self.da.parameters(), self.db.parameters()), lr, betas=(0.5, 0.999))
        rule = lambda e: 1.0 - max(0, e + 1 - decay_from) / float(epochs - decay_from + 1)
        self.scheds = [torch.optim.lr_scheduler.LambdaLR(o, rule) for o in (self.og, self.od)]
        self.pa, self.pb = Pool(), Pool()
        self.gan = lambda p, real: nn.functional.mse_loss(p, torch.full_like(p, float(real)))
        self.l1 = nn.L1Loss()

    def backward_g(self, a, b):
        self.fb, self.fa = self.gab(a), self.gba(b)
        adv = self.gan(self.db(self.fb), True) + self.gan(self.da(self.fa), True)
        cyc = self.l1(self.gba(self.fb), a) + self.l1(self.gab(self.fa), b)
        idt = self.l1(self.gab(b), b) + self.l1(self.gba(a), a)
        loss = adv + 10.0 * cyc + 5.0 * idt
        loss.backward()
        return loss

    def backward_d(self, d, real, fake):
        loss = 0.5 * (self.gan(d(real), True) + self.gan(d(fake), False))
        loss.backward()
        return loss

    def optimize(self, a, b):
        set_requires_grad([self.da, self.db], False)
        self.og.zero_grad()
        lg = self.backward_g(a, b)
        self.og.step()
        set_requires_grad([self.da, self.db], True)
        self.od.zero_grad()
        l1 = self.backward_d(self.da, a, self.pa.query(self.fa))
        l2 = self.backward_d(self.db, b, self.pb.query(self.fb))
        self.od.step()
        return lg.item(), l1.item() + l2.item()

    def end_epoch(self):
        for s in self.scheds:
            s.step()


if __name__ == "__main__":
    device = torch.device("cuda")
    model = CycleGAN(device)
    loader = DataLoader(UnpairedImages("horse2zebra"), 1, shuffle=True, num_workers=4)
    for epoch in range(200):
        for i, (a, b) in enumerate(loader):
            g, d = model.optimize(a.to(device), b.to(device))
            if i % 200 == 0:
                print(f"{epoch}/{i} G {g:.3f} D {d:.3f}")
        model.end_epoch()
        torch.save(model.gab.state_dict(), f"gab_{epoch}.pth")
