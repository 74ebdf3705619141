import argparse

import torch
from torch import nn, optim
from torch.nn import functional as F
from torchvision import datasets, transforms
from torchvision.utils import save_image

parser = argparse.ArgumentParser(description="VAE on MNIST")
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--epochs", type=int, default=20)
args = parser.parse_args()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def loader(train):
    ds = datasets.MNIST("data", train=train, download=True, transform=transforms.ToTensor())
    return torch.utils.data.DataLoader(ds, batch_size=args.batch, shuffle=train)


class VAE(nn.Module):
    def __init__(self, z=20):
        super().__init__()
        self.enc = nn.Sequential(nn.Flatten(), nn.Linear(784, 400), nn.ReLU())
        self.mu, self.logvar = nn.Linear(400, z), nn.Linear(400, z)
        self.dec = nn.Sequential(nn.Linear(z, 400), nn.ReLU(), nn.Linear(400, 784))

    def forward(self, x):
        h = self.enc(x)
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.dec(z), mu, logvar


def elbo(logits, x, mu, logvar):
    rec = F.binary_cross_entropy_with_logits(logits, x.flatten(1), reduction="sum")
    kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return (rec + kl) / x.size(0)


def train(model, data, optimizer):
    model.train()
    acc = 0.0
    for x, _ in data:
        x = x.to(device)
        optimizer.zero_grad()
        logits, mu, logvar = model(x)
        loss = elbo(logits, x, mu, logvar)
        loss.backward()
        acc += loss.item()
        optimizer.step()
    return acc / len(data)


def test(model, data):
    model.eval()
    acc = 0.0
    with torch.no_grad():
        for x, _ in data:
            x = x.to(device)
            logits, mu, logvar = model(x)
            acc += elbo(logits, x, mu, logvar).item()
        save_image(torch.sigmoid(logits[:16]).view(-1, 1, 28, 28), "recon.png")
    return acc / len(data)


if __name__ == "__main__":
    vae = VAE().to(device)
    opt = optim.Adam(vae.parameters(), lr=1e-3)
    tr, te = loader(True), loader(False)
    for e in range(1, args.epochs + 1):
        print(f"{e}: train {train(vae, tr, opt):.2f} test {test(vae, te):.2f}")
