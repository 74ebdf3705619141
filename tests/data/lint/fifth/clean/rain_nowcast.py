"""Short-horizon radar nowcasting with a small ConvGRU, trained by truncated BPTT."""
import argparse
import glob
import os

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class RadarEvents(Dataset):
    """Every file holds one rain event: float32 [T, H, W] in dBZ."""

    def __init__(self, root, length=96):
        self.files = sorted(glob.glob(os.path.join(root, "*.npy")))
        self.length = length

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        seq = np.load(self.files[i])[: self.length]
        seq = np.nan_to_num(seq, nan=0.0)  # masked radar pixels
        return torch.from_numpy(seq / 70.0).unsqueeze(1).float()


class ConvGRUCell(nn.Module):
    def __init__(self, cin, ch):
        super().__init__()
        self.ch = ch
        self.gates = nn.Conv2d(cin + ch, 2 * ch, 3, padding=1)
        self.cand = nn.Conv2d(cin + ch, ch, 3, padding=1)

    def forward(self, x, h):
        z, r = torch.sigmoid(self.gates(torch.cat([x, h], 1))).chunk(2, 1)
        n = torch.tanh(self.cand(torch.cat([x, r * h], 1)))
        return (1 - z) * h + z * n


class Nowcaster(nn.Module):
    def __init__(self, ch=48):
        super().__init__()
        self.cell = ConvGRUCell(1, ch)
        self.out = nn.Sequential(nn.Dropout2d(0.1), nn.Conv2d(ch, 1, 1))

    def initial(self, x):
        return x.new_zeros(x.size(0), self.cell.ch, x.size(-2), x.size(-1))

    def forward(self, frames, h):
        preds = []
        for t in range(frames.size(1)):
            h = self.cell(frames[:, t], h)
            preds.append(self.out(h))
        return torch.stack(preds, 1), h


def rain_weighted_l1(pred, target):
    weight = 1.0 + 4.0 * (target > 0.3).float()
    return (weight * (pred - target).abs()).mean()


@torch.no_grad()
def validate(net, loader, device):
    was_training = net.training
    net.eval()
    errs = []
    for event in loader:
        event = event.to(device)
        pred, _ = net(event[:, :-1], net.initial(event))
        errs.append(rain_weighted_l1(pred, event[:, 1:]))
    net.train(was_training)
    return torch.stack(errs).mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--train-dir", required=True)
    ap.add_argument("--val-dir", required=True)
    ap.add_argument("--window", type=int, default=12)
    ap.add_argument("--epochs", type=int, default=30)
    args = ap.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tr = DataLoader(RadarEvents(args.train_dir), batch_size=4, shuffle=True, num_workers=4)
    va = DataLoader(RadarEvents(args.val_dir), batch_size=4)
    net = Nowcaster().to(device)
    opt = torch.optim.Adam(net.parameters(), lr=5e-4)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=10, gamma=0.5)

    net.train()
    for epoch in range(args.epochs):
        seen, running = 0, 0.0
        for event in tr:
            event = event.to(device)
            h = net.initial(event)
            for s in range(0, event.size(1) - 1 - args.window, args.window):
                h = h.detach()
                x = event[:, s:s + args.window]
                y = event[:, s + 1:s + 1 + args.window]
                pred, h = net(x, h)
                loss = rain_weighted_l1(pred, y)
                opt.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                opt.step()
                running += loss.item()
                seen += 1
        sched.step()
        print(f"{epoch:03d} train {running / max(seen, 1):.4f} val {validate(net, va, device):.4f}")
    torch.save(net.state_dict(), "nowcaster.pt")


if __name__ == "__main__":
    main()
