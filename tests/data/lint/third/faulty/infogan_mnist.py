import itertools

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

Z, CAT, CONT = 62, 10, 2
dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class G(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(Z + CAT + CONT, 1024), nn.BatchNorm1d(1024), nn.ReLU(),
                               nn.Linear(1024, 128 * 49), nn.BatchNorm1d(128 * 49), nn.ReLU(), nn.Unflatten(1, (128, 7, 7)),
                               nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.ReLU(),
                               nn.ConvTranspose2d(64, 1, 4, 2, 1), nn.Tanh())

    def forward(self, z):
        return self.f(z)


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Conv2d(1, 64, 4, 2, 1), nn.LeakyReLU(0.1), nn.Conv2d(64, 128, 4, 2, 1),
                               nn.LeakyReLU(0.1), nn.Flatten(), nn.Linear(128 * 49, 1024), nn.LeakyReLU(0.1))

    def forward(self, x):
        return self.f(x)


def sample(n):
    c = torch.randint(0, CAT, (n,), device=dev)
    u = torch.rand(n, CONT, device=dev) * 2 - 1
    z = torch.cat([torch.randn(n, Z, device=dev), F.one_hot(c, CAT).float(), u], 1)
    return z, c, u


def main(epochs=50):
    torch.manual_seed(0)
    tf = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    dl = DataLoader(datasets.MNIST("data", True, tf, download=True), 128, shuffle=True, drop_last=True)
    gen, trunk = G().to(dev), Trunk().to(dev)
    head_d, head_q = nn.Linear(1024, 1).to(dev), nn.Linear(1024, CAT + CONT).to(dev)
    opt_d = torch.optim.Adam(itertools.chain(trunk.parameters(), head_d.parameters()), lr=2e-4, betas=(0.5, 0.999))
    opt_g = torch.optim.Adam(itertools.chain(gen.parameters(), head_q.parameters()), lr=1e-3, betas=(0.5, 0.999))
    bce = nn.BCEWithLogitsLoss()
    for epoch in range(epochs):
        for i, (real, _) in enumerate(dl):
            real = real.to(dev)
            n = len(real)
            ones, zeros = torch.ones(n, 1, device=dev), torch.zeros(n, 1, device=dev)
            z, c, u = sample(n)
            fake = gen(z)

            opt_d.zero_grad()
            loss_d = bce(head_d(trunk(real)), ones) + bce(head_d(trunk(fake.detach())), zeros)
            loss_d.backward()
            opt_d.step()

            h = trunk(fake)
            q = head_q(h)
            info = F.cross_entropy(q[:, :CAT], c) + 0.1 * F.mse_loss(q[:, CAT:], u)
            loss_g = bce(head_d(h), ones) + info
            loss_g.backward()
            opt_g.step()

            if i % 100 == 0:
                print(f"{epoch}/{i} d {loss_d.item():.3f} g {loss_g.item():.3f} info {info.item():.3f}")
    torch.save(gen.state_dict(), "infogan.pt")


if __name__ == "__main__":
    main()
