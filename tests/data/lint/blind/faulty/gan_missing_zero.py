import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from ring import gaussian_ring


def net(i, o, h=128):
    return nn.Sequential(nn.Linear(i, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, o))


def d_loss(disc, real, fake):
    r, f = disc(real), disc(fake)
    return bce(r, torch.ones_like(r)) + bce(f, torch.zeros_like(f))


def g_loss(disc, fake):
    f = disc(fake)
    return bce(f, torch.ones_like(f))


def main(steps=20_000, batch=256, z_dim=16):
    torch.manual_seed(0)
    gen, disc = net(z_dim, 2), net(2, 1)
    gen_opt = torch.optim.Adam(gen.parameters(), lr=1e-4, betas=(0.5, 0.9))
    disc_opt = torch.optim.Adam(disc.parameters(), lr=4e-4, betas=(0.5, 0.9))
    for step in range(steps):
        real = gaussian_ring(batch)
        fake = gen(torch.randn(batch, z_dim))

        disc_opt.zero_grad()
        loss_d = d_loss(disc, real, fake.detach())
        loss_d.backward()
        disc_opt.step()

        loss_g = g_loss(disc, fake)
        loss_g.backward()
        gen_opt.step()

        if step % 500 == 0:
            print(f"{step:6d} D {loss_d.item():.3f} G {loss_g.item():.3f}")
    torch.save(gen.state_dict(), "ring_generator.pt")


if __name__ == "__main__":
    main()
