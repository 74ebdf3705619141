import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchaudio
from torch.utils.data import DataLoader

from kws import MultiTagClips


class FocalLoss(nn.Module):
    """Binary focal loss for multi-label tags, computed on probabilities in float32."""

    def __init__(self, gamma=2.0, alpha=0.25):
        super().__init__()
        self.gamma, self.alpha = gamma, alpha

    def forward(self, logits, target):
        p = torch.sigmoid(logits.float())
        ce = F.binary_cross_entropy_with_logits(logits.float(), target, reduction="none")
        pt = p * target + (1 - p) * (1 - target)
        a = self.alpha * target + (1 - self.alpha) * (1 - target)
        return (a * (1 - pt) ** self.gamma * ce).sum(1).mean()


class DSConv(nn.Sequential):
    def __init__(self, c):
        super().__init__(nn.Conv2d(c, c, 3, padding=1, groups=c), nn.BatchNorm2d(c), nn.ReLU(),
                         nn.Conv2d(c, c, 1), nn.BatchNorm2d(c), nn.ReLU())


class KWSNet(nn.Module):
    def __init__(self, tags, c=64):
        super().__init__()
        self.mel = torchaudio.transforms.MelSpectrogram(16000, n_mels=40)
        self.stem = nn.Conv2d(1, c, (10, 4), stride=2, padding=(5, 2))
        self.blocks = nn.Sequential(*[DSConv(c) for _ in range(4)])
        self.fc = nn.Linear(c, tags)

    def forward(self, wav):
        x = self.mel(wav).clamp_min(1e-6).log().unsqueeze(1)
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


class AverageMeter:
    def __init__(self):
        self.sum = self.n = 0.0

    def update(self, v, n=1):
        self.sum += v * n
        self.n += n

    @property
    def avg(self):
        return self.sum / max(self.n, 1)


def fscore(model, loader, device):
    model.eval()
    tp = fp = fn = 0
    with torch.no_grad():
        for wav, y in loader:
            hit = model(wav.to(device)).sigmoid() > 0.5
            y = y.to(device).bool()
            tp += (hit & y).sum().item()
            fp += (hit & ~y).sum().item()
            fn += (~hit & y).sum().item()
    return 2 * tp / max(2 * tp + fp + fn, 1)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="clips")
    ap.add_argument("--epochs", type=int, default=50)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_dl = DataLoader(MultiTagClips(args.root, "train"), 128, shuffle=True, num_workers=8)
    val_dl = DataLoader(MultiTagClips(args.root, "val"), 256, num_workers=8)
    net = KWSNet(tags=35).to(dev)
    loss_fn = FocalLoss()
    opt = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=args.epochs)
    start, best = 0, 0.0
    if args.resume and os.path.isfile(args.resume):
        ck = torch.load(args.resume, map_location=dev)
        net.load_state_dict(ck["net"]); opt.load_state_dict(ck["opt"]); sched.load_state_dict(ck["sched"])
        start, best = ck["epoch"], ck["best"]
    for epoch in range(start, args.epochs):
        net.train()
        meter = AverageMeter()
        for wav, y in train_dl:
            loss = loss_fn(net(wav.to(dev)), y.float().to(dev))
            opt.zero_grad()
            loss.backward()
            opt.step()
            meter.update(loss.item(), wav.size(0))
        sched.step()
        f1 = fscore(net, val_dl, dev)
        best = max(best, f1)
        print(f"epoch {epoch} loss {meter.avg:.4f} val f1 {f1:.4f} best {best:.4f}")
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(),
                    "epoch": epoch + 1, "best": best}, "kws_last.pt")
