import torch
from torch import autograd


def gradient_penalty(critic, real, fake):
    eps = torch.rand(real.size(0), 1, 1, 1, device=real.device)
    mix = (eps * real + (1 - eps) * fake).requires_grad_(True)
    out = critic(mix)
    grad = autograd.grad(out, mix, grad_outputs=torch.ones_like(out), create_graph=True, retain_graph=True)[0]
    return ((grad.flatten(1).norm(2, dim=1) - 1) ** 2).mean()


def train(generator, critic, loader, z_dim, n_critic=5, lam=10.0, device="cuda"):
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.0, 0.9))
    opt_c = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))
    for i, (real, _) in enumerate(loader):
        real = real.to(device)
        z = torch.randn(real.size(0), z_dim, device=device)
        fake = generator(z).detach()
        loss_c = critic(fake).mean() - critic(real).mean() + lam * gradient_penalty(critic, real, fake)
        opt_c.zero_grad()
        loss_c.backward()
        opt_c.step()
        if i % n_critic == 0:
            loss_g = -critic(generator(torch.randn_like(z))).mean()
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
