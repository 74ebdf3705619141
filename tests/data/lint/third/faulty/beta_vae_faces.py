import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch.utils.data import DataLoader, random_split
from torchvision import transforms


class BetaVAE(nn.Module):
    def __init__(self, z=32):
        super().__init__()
        chans = [3, 32, 64, 128, 256]
        self.encoder = nn.Sequential(*[nn.Sequential(nn.Conv2d(i, o, 4, 2, 1), nn.BatchNorm2d(o), nn.LeakyReLU())
                                       for i, o in zip(chans, chans[1:])], nn.Flatten())
        self.stats = nn.Linear(256 * 16, 2 * z)
        self.lift = nn.Linear(z, 256 * 16)
        rev = chans[::-1]
        ups = [nn.Sequential(nn.ConvTranspose2d(i, o, 4, 2, 1), nn.BatchNorm2d(o), nn.LeakyReLU()) for i, o in zip(rev[:-2], rev[1:-1])]
        self.decoder = nn.Sequential(*ups, nn.ConvTranspose2d(32, 3, 4, 2, 1))

    def forward(self, x):
        mu, lv = self.stats(self.encoder(x)).chunk(2, 1)
        z = mu + torch.randn_like(mu) * (0.5 * lv).exp()
        return self.decoder(self.lift(z).view(-1, 256, 4, 4)), mu, lv


def vae_loss(rec, x, mu, lv, beta):
    r = F.mse_loss(torch.sigmoid(rec), x, reduction="sum") / len(x)
    k = -0.5 * (1 + lv - mu.pow(2) - lv.exp()).sum(1).mean()
    return r + beta * k, r, k


def train_epoch(model, loader, opt, beta, device):
    model.train()
    epoch_loss = 0.0
    rec_sum = kl_sum = 0.0
    for x, _ in loader:
        x = x.to(device)
        opt.zero_grad()
        rec, mu, lv = model(x)
        loss, r, k = vae_loss(rec, x, mu, lv, beta)
        loss.backward()
        opt.step()
        epoch_loss += loss
        rec_sum += r.item()
        kl_sum += k.item()
    n = len(loader)
    return float(epoch_loss) / n, rec_sum / n, kl_sum / n


@torch.no_grad()
def evaluate(model, loader, beta, device):
    model.eval()
    return sum(vae_loss(*_unpack(model, x.to(device)), beta)[0].item() for x, _ in loader) / len(loader)


def _unpack(model, x):
    rec, mu, lv = model(x)
    return rec, x, mu, lv


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="celeba64")
    ap.add_argument("--beta", type=float, default=4.0)
    ap.add_argument("--epochs", type=int, default=30)
    ap.add_argument("--out", default="runs/bvae")
    args = ap.parse_args()
    os.makedirs(args.out, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    full = torchvision.datasets.ImageFolder(args.root, transforms.Compose([transforms.Resize((64, 64)), transforms.ToTensor()]))
    n = len(full) // 20
    tr, va = random_split(full, [len(full) - n, n], torch.Generator().manual_seed(0))
    tl, vl = DataLoader(tr, 128, shuffle=True, num_workers=8), DataLoader(va, 256, num_workers=4)
    model = BetaVAE().to(device)
    opt = torch.optim.Adam(model.parameters(), lr=5e-4)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.95)
    for e in range(args.epochs):
        loss, r, k = train_epoch(model, tl, opt, args.beta, device)
        sched.step()
        print(f"{e} loss {loss:.2f} rec {r:.2f} kl {k:.2f} val {evaluate(model, vl, args.beta, device):.2f}")
        torch.save(model.state_dict(), os.path.join(args.out, "last.pt"))


if __name__ == "__main__":
    main()
