"""Vector-quantised autoencoder for pen sketches."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from quickraster import Sketches


class Codebook(nn.Module):
    def __init__(self, k=256, d=32, beta=0.25):
        super().__init__()
        self.e = nn.Embedding(k, d)
        nn.init.uniform_(self.e.weight, -1 / k, 1 / k)
        self.beta = beta

    def forward(self, z):
        b, d, h, w = z.shape
        flat = z.permute(0, 2, 3, 1).reshape(-1, d)
        idx = torch.cdist(flat, self.e.weight).argmin(1)
        q = self.e(idx).view(b, h, w, d).permute(0, 3, 1, 2)
        commit = F.mse_loss(q, z.detach()) + self.beta * F.mse_loss(q.detach(), z)
        return z + (q - z).detach(), commit, idx


class SketchVQ(nn.Module):
    def __init__(self, c=64, d=32):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, c, 4, 2, 1), nn.ReLU(), nn.Conv2d(c, c, 4, 2, 1), nn.ReLU(), nn.Conv2d(c, d, 1))
        self.book = Codebook(d=d)
        self.dec = nn.Sequential(nn.Conv2d(d, c, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(c, c, 4, 2, 1), nn.ReLU(),
                                 nn.ConvTranspose2d(c, 1, 4, 2, 1))

    def forward(self, x):
        q, commit, idx = self.book(self.enc(x))
        return self.dec(q), commit, idx


def perplexity(idx, k=256):
    p = torch.bincount(idx, minlength=k).float()
    p = p / p.sum()
    return torch.exp(-(p * (p + 1e-10).log()).sum()).item()


@torch.no_grad()
def reconstruct_error(net, dl, dev):
    net.eval()
    e = [F.binary_cross_entropy_with_logits(net(x.to(dev))[0], x.to(dev)).item() for x in dl]
    net.train()
    return sum(e) / len(e)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="sketches")
    ap.add_argument("--epochs", type=int, default=40)
    ap.add_argument("--bs", type=int, default=128)
    a = ap.parse_args()
    torch.manual_seed(0)
    dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tr = DataLoader(Sketches(a.root, "train"), a.bs, shuffle=True, num_workers=4)
    va = DataLoader(Sketches(a.root, "valid"), a.bs)
    net = SketchVQ().to(dev)
    opt = torch.optim.Adam(net.parameters(), lr=3e-4)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.95)
    net.train()
    for ep in range(a.epochs):
        run = 0.0
        for x in tr:
            x = x.to(dev)
            logits, commit, idx = net(x)
            recon = F.binary_cross_entropy_with_logits(logits, x)
            loss = recon + commit
            opt.zero_grad()
            loss.backward(retain_graph=True)
            opt.step()
            run += recon.item()
        sched.step()
        print(f"{ep} recon {run / len(tr):.4f} codes {perplexity(idx):.1f} valid {reconstruct_error(net, va, dev):.4f}")
    torch.save(net.state_dict(), "sketchvq.pt")


if __name__ == "__main__":
    main()
