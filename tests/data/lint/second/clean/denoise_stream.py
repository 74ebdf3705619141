"""Streaming speech enhancement: a stateful GRU mask estimator trained with truncated BPTT."""
import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from noisy_speech import LongClips


class MaskNet(nn.Module):
    def __init__(self, bins=257, hidden=400):
        super().__init__()
        self.inp = nn.Linear(bins, hidden)
        self.gru = nn.GRU(hidden, hidden, num_layers=2, batch_first=True)
        self.out = nn.Linear(hidden, bins)
        self.state = None

    def reset_state(self):
        self.state = None

    def forward(self, mag):
        h = torch.relu(self.inp(mag.log1p()))
        if self.state is not None:
            self.state = self.state.detach()
        h, self.state = self.gru(h, self.state)
        return torch.sigmoid(self.out(h)) * mag


def spectral_loss(est, ref):
    lin = (est - ref).abs().mean()
    comp = (est.clamp_min(1e-7).pow(0.3) - ref.clamp_min(1e-7).pow(0.3)).pow(2).mean()
    return lin + 10 * comp


class Session:
    chunk = 64

    def __init__(self, device):
        self.device = device
        self.net = MaskNet().to(device)
        self.optim = torch.optim.RMSprop(self.net.parameters(), lr=5e-4)
        self.sched = torch.optim.lr_scheduler.ExponentialLR(self.optim, gamma=0.97)

    def chunks(self, noisy, clean):
        return zip(noisy.split(self.chunk, dim=1), clean.split(self.chunk, dim=1))

    def train_clip(self, noisy, clean):
        self.net.reset_state()
        acc, n = 0.0, 0
        for x, y in self.chunks(noisy, clean):
            self.optim.zero_grad()
            loss = spectral_loss(self.net(x), y)
            loss.backward()
            nn.utils.clip_grad_value_(self.net.parameters(), 1.0)
            self.optim.step()
            acc += float(loss)
            n += 1
        return acc / n

    def run_epoch(self, loader):
        self.net.train()
        vals = [self.train_clip(a.to(self.device), b.to(self.device)) for a, b in loader]
        self.sched.step()
        return sum(vals) / len(vals)

    def score(self, loader):
        self.net.eval()
        total = 0.0
        with torch.no_grad():
            for a, b in loader:
                self.net.reset_state()
                total += spectral_loss(self.net(a.to(self.device)), b.to(self.device)).item()
        return total / len(loader)


if __name__ == "__main__":
    torch.manual_seed(5)
    s = Session("cuda" if torch.cuda.is_available() else "cpu")
    tr = DataLoader(LongClips("train"), batch_size=8, shuffle=True)
    va = DataLoader(LongClips("valid"), batch_size=8)
    best = 1e9
    for ep in range(60):
        a, b = s.run_epoch(tr), s.score(va)
        print(f"{ep:3d} train {a:.5f} valid {b:.5f} lr {s.sched.get_last_lr()[0]:.2e}")
        if b < best:
            best = b
            torch.save(s.net.state_dict(), "masknet.pt")
