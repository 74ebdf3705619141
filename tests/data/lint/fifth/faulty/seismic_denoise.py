import argparse
import glob

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Shots(Dataset):
    def __init__(self, pattern, noise=0.3):
        self.files, self.noise = sorted(glob.glob(pattern)), noise

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        g = torch.from_numpy(np.load(self.files[i])).float()[None]
        g = g / g.abs().max().clamp(min=1e-6)
        return g + self.noise * torch.randn_like(g), g


class DnCNN(nn.Module):
    def __init__(self, depth=12, c=64):
        super().__init__()
        mid = []
        for _ in range(depth - 2):
            mid += [nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c), nn.ReLU(inplace=True)]
        self.f = nn.Sequential(nn.Conv2d(1, c, 3, padding=1), nn.ReLU(inplace=True), *mid, nn.Conv2d(c, 1, 3, padding=1))

    def forward(self, x):
        return x - self.f(x)


def snr(clean, est):
    return 10 * torch.log10(clean.pow(2).sum() / (clean - est).pow(2).sum().clamp(min=1e-12))


def train_epoch(net, loader, opt, device):
    net.train()
    epoch_loss = 0
    for noisy, clean in loader:
        noisy, clean = noisy.to(device), clean.to(device)
        est = net(noisy)
        loss = nn.functional.mse_loss(est, clean)
        opt.zero_grad()
        loss.backward()
        opt.step()
        epoch_loss += loss * noisy.size(0)
    return (epoch_loss / len(loader.dataset)).item()


@torch.no_grad()
def evaluate(net, loader, device):
    net.eval()
    vals = [snr(c.to(device), net(n.to(device))).item() for n, c in loader]
    return float(np.mean(vals))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--train", default="shots/train/*.npy")
    ap.add_argument("--val", default="shots/val/*.npy")
    ap.add_argument("--epochs", type=int, default=60)
    ap.add_argument("--lr", type=float, default=1e-3)
    a = ap.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tr = DataLoader(Shots(a.train), 16, shuffle=True, num_workers=4)
    va = DataLoader(Shots(a.val), 16)
    net = DnCNN().to(device)
    opt = torch.optim.Adam(net.parameters(), lr=a.lr)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, [30, 50], 0.2)
    for e in range(a.epochs):
        l = train_epoch(net, tr, opt, device)
        sched.step()
        print(f"epoch {e} mse {l:.6f} val SNR {evaluate(net, va, device):.2f} dB")
    torch.save(net.state_dict(), "dncnn_seismic.pt")


if __name__ == "__main__":
    main()
