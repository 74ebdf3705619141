import itertools

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from melset import MelSlices

Z = 128
LAMBDA = 10.0
N_CRITIC = 5
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def block(i, o):
    return nn.Sequential(nn.ConvTranspose1d(i, o, 4, 2, 1), nn.BatchNorm1d(o), nn.ReLU(True))


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(Z, 512 * 4)
        self.net = nn.Sequential(block(512, 256), block(256, 128), nn.ConvTranspose1d(128, 80, 4, 2, 1), nn.Tanh())

    def forward(self, z):
        return self.net(self.fc(z).view(-1, 512, 4))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(80, 128, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv1d(128, 256, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv1d(256, 512, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Flatten(), nn.Linear(512 * 4, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


def gradient_penalty(critic, real, fake):
    a = torch.rand(real.size(0), 1, 1, device=real.device)
    x = (a * real + (1 - a) * fake).requires_grad_(True)
    score = critic(x)
    g, = torch.autograd.grad(score.sum(), x, create_graph=True, retain_graph=True)
    return ((g.flatten(1).norm(2, dim=1) - 1) ** 2).mean()


def main():
    torch.manual_seed(99)
    loader = DataLoader(MelSlices("mels/", frames=32), batch_size=64, shuffle=True, drop_last=True)
    G, D = Generator().to(device), Critic().to(device)
    opts = {
        "g": torch.optim.Adam(G.parameters(), lr=1e-4, betas=(0.0, 0.9)),
        "d": torch.optim.Adam(D.parameters(), lr=1e-4, betas=(0.0, 0.9)),
    }
    fixed = torch.randn(16, Z, device=device)
    step = 0
    for epoch in itertools.count():
        for real in loader:
            real = real.to(device)
            z = torch.randn(real.size(0), Z, device=device)
            fake = G(z).detach()
            loss_d = D(fake).mean() - D(real).mean() + LAMBDA * gradient_penalty(D, real, fake)
            opts["d"].zero_grad()
            loss_d.backward()
            opts["d"].step()

            if step % N_CRITIC == 0:
                loss_g = -D(G(torch.randn(real.size(0), Z, device=device))).mean()
                opts["g"].zero_grad()
                loss_g.backward()
                opts["g"].step()
                if step % 500 == 0:
                    print(f"{epoch}/{step} critic {loss_d.item():.3f} gen {loss_g.item():.3f}")
            if step % 2000 == 0:
                G.eval()
                with torch.no_grad():
                    torch.save(G(fixed).cpu(), f"samples_{step:07d}.pt")
                G.train()
            step += 1
            if step >= 100_000:
                return


if __name__ == "__main__":
    main()
