import os

import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms
from torchvision.utils import save_image

Z = 128


def sn(m):
    return nn.utils.spectral_norm(m)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(Z, 512 * 16)
        c, layers = 512, []
        for o in (256, 128, 64):
            layers += [nn.Upsample(scale_factor=2), nn.Conv2d(c, o, 3, 1, 1), nn.BatchNorm2d(o), nn.ReLU(True)]
            c = o
        self.body = nn.Sequential(*layers, nn.Upsample(scale_factor=2), nn.Conv2d(64, 3, 3, 1, 1), nn.Tanh())

    def forward(self, z):
        return self.body(self.stem(z).view(-1, 512, 4, 4))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        c, layers = 3, []
        for o in (64, 128, 256, 512):
            layers += [sn(nn.Conv2d(c, o, 4, 2, 1)), nn.LeakyReLU(0.2, True)]
            c = o
        self.body = nn.Sequential(*layers, nn.Flatten(), sn(nn.Linear(512 * 16, 1)))

    def forward(self, x):
        return self.body(x)


class GANTrainer:
    def __init__(self, folder, device):
        tf = transforms.Compose([transforms.Resize((64, 64)), transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)])
        self.loader = DataLoader(datasets.ImageFolder(folder, tf), 64, shuffle=True, num_workers=4, drop_last=True)
        self.G, self.D, self.device = Generator().to(device), Discriminator().to(device), device
        self.optim = {"G": torch.optim.Adam(self.G.parameters(), 2e-4, (0.5, 0.999)),
                      "D": torch.optim.Adam(self.D.parameters(), 2e-4, (0.5, 0.999))}
        self.mse = nn.MSELoss()
        self.noise = torch.randn(64, Z, device=device)

    def d_step(self, real, fake):
        pr, pf = self.D(real), self.D(fake.detach())
        loss = 0.5 * (self.mse(pr, torch.ones_like(pr)) + self.mse(pf, torch.zeros_like(pf)))
        self.optim["D"].zero_grad()
        loss.backward(retain_graph=True)
        self.optim["D"].step()
        return loss.item()

    def g_step(self, fake):
        p = self.D(fake)
        loss = 0.5 * self.mse(p, torch.ones_like(p))
        self.optim["G"].zero_grad()
        loss.backward()
        self.optim["G"].step()
        return loss.item()

    def run(self, epochs):
        os.makedirs("samples", exist_ok=True)
        for e in range(epochs):
            d = g = 0.0
            for real, _ in self.loader:
                fake = self.G(torch.randn(len(real), Z, device=self.device))
                d += self.d_step(real.to(self.device), fake)
                g += self.g_step(fake)
            print(f"{e:3d} D {d / len(self.loader):.4f} G {g / len(self.loader):.4f}")
            self.G.eval()
            with torch.inference_mode():
                save_image(self.G(self.noise), f"samples/{e:03d}.png", nrow=8, normalize=True)
            self.G.train()


if __name__ == "__main__":
    GANTrainer("anime_faces", torch.device("cuda" if torch.cuda.is_available() else "cpu")).run(100)
