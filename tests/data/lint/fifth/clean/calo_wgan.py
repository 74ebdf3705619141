# Calorimeter shower generation: conditional WGAN-GP on 24x24 energy images.
import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from showers import ShowerImages

Z, CRITIC_STEPS, LAMBDA = 64, 5, 10.0
dev = torch.device("cuda")


class Gen(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(Z + 1, 128 * 6 * 6)
        self.up = nn.Sequential(
            nn.BatchNorm2d(128), nn.ReLU(),
            nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.ConvTranspose2d(64, 1, 4, 2, 1), nn.Softplus())

    def forward(self, z, e):
        h = self.fc(torch.cat([z, e], 1)).view(-1, 128, 6, 6)
        return self.up(h)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 64, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(64, 128, 4, 2, 1), nn.LayerNorm([128, 6, 6]), nn.LeakyReLU(0.2), nn.Flatten())
        self.score = nn.Linear(128 * 36 + 1, 1)

    def forward(self, x, e):
        return self.score(torch.cat([self.conv(x), e], 1)).squeeze(1)


def penalty(critic, real, fake, e):
    eps = torch.rand(real.size(0), 1, 1, 1, device=real.device)
    mix = (eps * real + (1 - eps) * fake).requires_grad_(True)
    out = critic(mix, e)
    (g,) = torch.autograd.grad(out.sum(), mix, create_graph=True)
    return ((g.flatten(1).norm(2, dim=1) - 1) ** 2).mean()


def main():
    torch.manual_seed(3)
    G, C = Gen().to(dev), Critic().to(dev)
    opts = {
        "G": torch.optim.Adam(G.parameters(), lr=1e-4, betas=(0.0, 0.9)),
        "C": torch.optim.Adam(C.parameters(), lr=1e-4, betas=(0.0, 0.9)),
    }
    data = DataLoader(ShowerImages("electrons.h5"), batch_size=128, shuffle=True, drop_last=True)
    it = 0
    for epoch in range(100):
        w_dist = 0.0
        for img, energy in data:
            img, energy = img.to(dev), energy.to(dev)
            z = torch.randn(img.size(0), Z, device=dev)
            with torch.no_grad():
                fake = G(z, energy)
            gap = C(img, energy).mean() - C(fake, energy).mean()
            c_loss = -gap + LAMBDA * penalty(C, img, fake, energy)
            opts["C"].zero_grad()
            c_loss.backward()
            opts["C"].step()
            w_dist += gap.item()
            it += 1

            if it % CRITIC_STEPS == 0:
                C.requires_grad_(False)
                z = torch.randn(img.size(0), Z, device=dev)
                g_loss = -C(G(z, energy), energy).mean()
                opts["G"].zero_grad()
                g_loss.backward()
                opts["G"].step()
                C.requires_grad_(True)
        print(f"epoch {epoch}: W ~ {w_dist / len(data):.3f}")
        torch.save(G.state_dict(), f"gen_{epoch:03d}.pt")


if __name__ == "__main__":
    main()
