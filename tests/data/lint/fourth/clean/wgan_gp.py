import argparse

import torch
import torch.nn as nn
from torch import autograd, optim
from torch.utils.data import DataLoader
from torchvision import datasets, transforms, utils


def block(i, o, norm=True):
    layers = [nn.Linear(i, o)]
    if norm:
        layers.append(nn.BatchNorm1d(o))
    return layers + [nn.LeakyReLU(0.2, inplace=True)]


class Generator(nn.Module):
    def __init__(self, z):
        super().__init__()
        self.net = nn.Sequential(*block(z, 128, False), *block(128, 256), *block(256, 512), nn.Linear(512, 784), nn.Tanh())

    def forward(self, z):
        return self.net(z).view(-1, 1, 28, 28)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.LeakyReLU(0.2), nn.Linear(512, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))

    def forward(self, x):
        return self.net(x)


def gradient_penalty(critic, real, fake):
    eps = torch.rand(real.size(0), 1, 1, 1, device=real.device)
    mix = (eps * real + (1 - eps) * fake).requires_grad_(True)
    score = critic(mix)
    grads = autograd.grad(outputs=score, inputs=mix, grad_outputs=torch.ones_like(score),
                          create_graph=True, retain_graph=True, only_inputs=True)[0]
    return ((grads.flatten(1).norm(2, dim=1) - 1) ** 2).mean()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=100)
    ap.add_argument("--z", type=int, default=100)
    ap.add_argument("--n-critic", type=int, default=5)
    ap.add_argument("--lambda-gp", type=float, default=10.0)
    cfg = ap.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    tf = transforms.Compose([transforms.ToTensor(), transforms.Normalize([0.5], [0.5])])
    loader = DataLoader(datasets.MNIST("data", download=True, transform=tf), batch_size=64, shuffle=True, drop_last=True)
    G, C = Generator(cfg.z).to(device), Critic().to(device)
    opt_g = optim.Adam(G.parameters(), lr=1e-4, betas=(0.0, 0.9))
    opt_c = optim.Adam(C.parameters(), lr=1e-4, betas=(0.0, 0.9))

    step = 0
    for epoch in range(cfg.epochs):
        for real, _ in loader:
            real = real.to(device)
            with torch.no_grad():
                fake = G(torch.randn(real.size(0), cfg.z, device=device))
            opt_c.zero_grad()
            gp = gradient_penalty(C, real, fake)
            loss_c = C(fake).mean() - C(real).mean() + cfg.lambda_gp * gp
            loss_c.backward()
            opt_c.step()
            step += 1

            if step % cfg.n_critic == 0:
                for p in C.parameters():
                    p.requires_grad_(False)
                opt_g.zero_grad()
                loss_g = -C(G(torch.randn(real.size(0), cfg.z, device=device))).mean()
                loss_g.backward()
                opt_g.step()
                for p in C.parameters():
                    p.requires_grad_(True)
                if step % 500 == 0:
                    print(f"{epoch} {step} critic {loss_c.item():.3f} gen {loss_g.item():.3f} gp {gp.item():.3f}")
        G.eval()
        with torch.no_grad():
            utils.save_image(G(torch.randn(25, cfg.z, device=device)), f"wgan_{epoch}.png", nrow=5, normalize=True)
        G.train()


if __name__ == "__main__":
    main()
