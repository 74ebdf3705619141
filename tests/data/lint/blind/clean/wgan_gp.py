import torch
from torch import autograd
from torch.utils.data import DataLoader

from cells import CellImages
from nets import Critic, Generator

Z, LAMBDA, N_CRITIC = 128, 10.0, 5


def gradient_penalty(critic, real, fake):
    eps = torch.rand(real.size(0), 1, 1, 1, device=real.device)
    mid = (eps * real + (1 - eps) * fake).requires_grad_(True)
    score = critic(mid)
    grad = autograd.grad(score.sum(), mid, create_graph=True)[0]
    return ((grad.flatten(1).norm(2, dim=1) - 1) ** 2).mean()


class WGAN:
    def __init__(self, device):
        self.device = device
        self.G, self.D = Generator(Z).to(device), Critic().to(device)
        self.opt_g = torch.optim.Adam(self.G.parameters(), lr=1e-4, betas=(0.0, 0.9))
        self.opt_d = torch.optim.Adam(self.D.parameters(), lr=1e-4, betas=(0.0, 0.9))

    def noise(self, n):
        return torch.randn(n, Z, device=self.device)

    def critic_step(self, real):
        with torch.no_grad():
            fake = self.G(self.noise(real.size(0)))
        loss = self.D(fake).mean() - self.D(real).mean() + LAMBDA * gradient_penalty(self.D, real, fake)
        self.opt_d.zero_grad(set_to_none=True)
        loss.backward()
        self.opt_d.step()
        return loss.item()

    def generator_step(self, n):
        loss = -self.D(self.G(self.noise(n))).mean()
        self.opt_g.zero_grad(set_to_none=True)
        loss.backward()
        self.opt_g.step()
        return loss.item()


def main():
    gan = WGAN("cuda")
    loader = DataLoader(CellImages("train"), 64, shuffle=True, drop_last=True)
    g = float("nan")
    for epoch in range(100):
        for i, real in enumerate(loader):
            d = gan.critic_step(real.to("cuda"))
            if i % N_CRITIC == N_CRITIC - 1:
                g = gan.generator_step(real.size(0))
        print(f"epoch {epoch} critic {d:.3f} generator {g:.3f}")
        torch.save(gan.G.state_dict(), "g.pt")


if __name__ == "__main__":
    main()
