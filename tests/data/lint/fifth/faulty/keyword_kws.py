import argparse

import torch
import torch.nn as nn
import torchaudio
from torch.utils.data import DataLoader
from torchaudio.datasets import SPEECHCOMMANDS

LABELS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")


class Words(SPEECHCOMMANDS):
    def __init__(self, root, subset):
        super().__init__(root, download=True, subset=subset)
        self._walker = [w for w in self._walker if w.split("/")[-2] in LABELS]


def collate(rows):
    wav = torch.zeros(len(rows), 16000)
    y = torch.empty(len(rows), dtype=torch.long)
    for i, (w, _, label, *_) in enumerate(rows):
        wav[i, :w.size(1)] = w[0, :16000]
        y[i] = LABELS.index(label)
    return wav, y


class SepConv(nn.Module):
    def __init__(self, i, o, k):
        super().__init__()
        self.f = nn.Sequential(nn.Conv1d(i, i, k, padding=k // 2, groups=i), nn.Conv1d(i, o, 1), nn.BatchNorm1d(o), nn.ReLU())

    def forward(self, x):
        return self.f(x)


class Spotter(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.mel = torchaudio.transforms.MelSpectrogram(16000, n_fft=512, hop_length=160, n_mels=64)
        self.net = nn.Sequential(SepConv(64, 128, 11), SepConv(128, 128, 13), SepConv(128, 128, 15), nn.Dropout(0.2),
                                 SepConv(128, 128, 17), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(128, n))

    def forward(self, wav):
        return self.net((self.mel(wav) + 1e-6).log())


def fit_epoch(net, dl, crit, opt, accumulate, device):
    net.train()
    opt.zero_grad()
    seen, total = 0, 0.0
    for step, (wav, y) in enumerate(dl):
        logits = net(wav.to(device))
        loss = crit(logits, y.to(device))
        loss.backward()
        total += loss.item() * len(y)
        seen += len(y)
        if (step + 1) % accumulate == 0 or step + 1 == len(dl):
            nn.utils.clip_grad_norm_(net.parameters(), 2.0)
            opt.step()
            opt.zero_grad()
    return total / seen


@torch.no_grad()
def error_rate(net, dl, device):
    net.eval()
    wrong = n = 0
    for wav, y in dl:
        wrong += (net(wav.to(device)).argmax(-1).cpu() != y).sum().item()
        n += len(y)
    return wrong / n


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default=".")
    ap.add_argument("--bs", type=int, default=32)
    ap.add_argument("--accumulate", type=int, default=8)
    ap.add_argument("--epochs", type=int, default=30)
    a = ap.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train = DataLoader(Words(a.root, "training"), a.bs, shuffle=True, collate_fn=collate, num_workers=4)
    valid = DataLoader(Words(a.root, "validation"), 256, collate_fn=collate, num_workers=4)
    net = Spotter(len(LABELS)).to(device)
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, a.epochs)
    crit = nn.CrossEntropyLoss(label_smoothing=0.05)
    best = 1.0
    for e in range(a.epochs):
        tl = fit_epoch(net, train, crit, opt, a.accumulate, device)
        sched.step()
        er = error_rate(net, valid, device)
        print(f"{e} loss {tl:.4f} valid err {er:.4f}")
        if er < best:
            best = er
            torch.save(net.state_dict(), "spotter.pt")
