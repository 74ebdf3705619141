import argparse
import itertools
import random

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from data import UnpairedDataset
from networks import PatchDiscriminator, ResnetGenerator


class ImagePool:
    def __init__(self, size=50):
        self.size, self.items = size, []

    def query(self, images):
        out = []
        for im in images.detach().split(1):
            if len(self.items) < self.size:
                self.items.append(im)
                out.append(im)
            elif random.random() > 0.5:
                k = random.randrange(self.size)
                out.append(self.items[k])
                self.items[k] = im
            else:
                out.append(im)
        return torch.cat(out)


def set_requires_grad(nets, flag):
    for net in nets:
        for p in net.parameters():
            p.requires_grad = flag


def main(opt):
    device = torch.device("cuda")
    G_AB, G_BA = ResnetGenerator().to(device), ResnetGenerator().to(device)
    D_A, D_B = PatchDiscriminator().to(device), PatchDiscriminator().to(device)
    optims = {
        "G": torch.optim.Adam(itertools.chain(G_AB.parameters(), G_BA.parameters()), lr=opt.lr, betas=(0.5, 0.999)),
        "D": torch.optim.Adam(itertools.chain(D_A.parameters(), D_B.parameters()), lr=opt.lr, betas=(0.5, 0.999)),
    }
    decay_from = opt.epochs // 2
    rule = lambda e: 1.0 - max(0, e - decay_from) / (opt.epochs - decay_from)
    scheds = [torch.optim.lr_scheduler.LambdaLR(o, rule) for o in optims.values()]
    gan, l1 = nn.MSELoss(), nn.L1Loss()
    pool_A, pool_B = ImagePool(), ImagePool()
    loader = DataLoader(UnpairedDataset(opt.root), batch_size=1, shuffle=True, num_workers=4)

    def adv(pred, real):
        return gan(pred, torch.full_like(pred, 1.0 if real else 0.0))

    def d_loss(D, real, fake):
        return 0.5 * (adv(D(real), True) + adv(D(fake), False))

    for epoch in range(opt.epochs):
        for i, batch in enumerate(loader):
            A, B = batch["A"].to(device), batch["B"].to(device)

            set_requires_grad([D_A, D_B], False)
            optims["G"].zero_grad()
            fake_B, fake_A = G_AB(A), G_BA(B)
            loss_cycle = l1(G_BA(fake_B), A) + l1(G_AB(fake_A), B)
            loss_idt = l1(G_AB(B), B) + l1(G_BA(A), A)
            loss_adv = adv(D_B(fake_B), True) + adv(D_A(fake_A), True)
            loss_G = loss_adv + opt.lam * loss_cycle + 0.5 * opt.lam * loss_idt
            loss_G.backward()
            optims["G"].step()

            set_requires_grad([D_A, D_B], True)
            optims["D"].zero_grad()
            loss_DA = d_loss(D_A, A, pool_A.query(fake_A))
            loss_DA.backward()
            loss_DB = d_loss(D_B, B, pool_B.query(fake_B))
            loss_DB.backward()
            optims["D"].step()

            if i % 100 == 0:
                print(f"{epoch}/{i} G {loss_G.item():.3f} D_A {loss_DA.item():.3f} D_B {loss_DB.item():.3f}")
        for s in scheds:
            s.step()
        torch.save({"AB": G_AB.state_dict(), "BA": G_BA.state_dict()}, "cyclegan.pt")


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--root", default="datasets/horse2zebra")
    p.add_argument("--epochs", type=int, default=200)
    p.add_argument("--lr", type=float, default=2e-4)
    p.add_argument("--lam", type=float, default=10.0)
    main(p.parse_args())
