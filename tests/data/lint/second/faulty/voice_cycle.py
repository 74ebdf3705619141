import itertools

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from vcc import SpeakerMels

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def conv(i, o, k=5):
    return nn.Sequential(nn.Conv1d(i, o, k, padding=k // 2), nn.InstanceNorm1d(o), nn.ReLU())


def make_generator(ch=36):
    return nn.Sequential(conv(ch, 128, 15), conv(128, 256), conv(256, 128), nn.Conv1d(128, ch, 15, padding=7))


def make_critic(ch=36):
    return nn.Sequential(nn.Conv1d(ch, 64, 5, 2, 2), nn.LeakyReLU(0.2), nn.Conv1d(64, 128, 5, 2, 2),
                         nn.LeakyReLU(0.2), nn.Conv1d(128, 1, 3, 1, 1))


def lsgan(score, real):
    return (score - (1.0 if real else 0.0)).pow(2).mean()


def main(epochs=200, lam_cyc=10.0, lam_id=5.0):
    torch.manual_seed(71)
    G_ab, G_ba = make_generator().to(device), make_generator().to(device)
    D_a, D_b = make_critic().to(device), make_critic().to(device)
    opt_g = torch.optim.Adam(itertools.chain(G_ab.parameters(), G_ba.parameters()), lr=2e-4, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(itertools.chain(D_a.parameters(), G_ba.parameters()), lr=1e-4, betas=(0.5, 0.999))
    sched_g = torch.optim.lr_scheduler.LinearLR(opt_g, 1.0, 0.01, total_iters=epochs)
    sched_d = torch.optim.lr_scheduler.LinearLR(opt_d, 1.0, 0.01, total_iters=epochs)
    loader_a = DataLoader(SpeakerMels("SF1"), 8, shuffle=True, drop_last=True)
    loader_b = DataLoader(SpeakerMels("TM1"), 8, shuffle=True, drop_last=True)

    for epoch in range(epochs):
        for a, b in zip(loader_a, loader_b):
            a, b = a.to(device), b.to(device)
            fake_b, fake_a = G_ab(a), G_ba(b)
            cycle = F.l1_loss(G_ba(fake_b), a) + F.l1_loss(G_ab(fake_a), b)
            ident = F.l1_loss(G_ab(b), b) + F.l1_loss(G_ba(a), a)
            loss_g = lsgan(D_b(fake_b), True) + lsgan(D_a(fake_a), True) + lam_cyc * cycle
            if epoch < 20:
                loss_g = loss_g + lam_id * ident
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()

            loss_d = lsgan(D_a(a), True) + lsgan(D_a(fake_a.detach()), False)
            loss_d = loss_d + lsgan(D_b(b), True) + lsgan(D_b(fake_b.detach()), False)
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()
        sched_g.step()
        sched_d.step()
        print(f"epoch {epoch} G {loss_g.item():.4f} D {loss_d.item():.4f} cycle {cycle.item():.4f}")
        if epoch % 20 == 0:
            torch.save({"ab": G_ab.state_dict(), "ba": G_ba.state_dict()}, f"cyclevc_{epoch}.pt")


if __name__ == "__main__":
    main()
