import random

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from timit import TimitFrames, pad_frames


class TDNN(nn.Module):
    def __init__(self, feats=40, classes=48, width=512):
        super().__init__()
        ctx = [(feats, 5, 1), (width, 3, 2), (width, 3, 3), (width, 1, 1)]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv1d(c, width, k, dilation=d, padding=d * (k // 2)), nn.BatchNorm1d(width), nn.ReLU())
            for c, k, d in ctx)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Conv1d(width, classes, 1)

    def forward(self, x):
        for l in self.layers:
            x = l(x)
        return self.out(self.drop(x))


def fit_one_epoch(net, loader, criterion, opt, device):
    net.train()
    loss_sum = frames = 0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        opt.zero_grad()
        loss = criterion(net(x), y)
        loss.backward()
        opt.step()
        n = (y >= 0).sum().item()
        loss_sum += loss.item() * n
        frames += n
    return loss_sum / frames


def frame_error(net, loader, criterion, device):
    net.eval()
    wrong, frames, loss_sum = 0, 0, 0.0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        logits = net(x)
        mask = y >= 0
        wrong += (logits.argmax(1) != y)[mask].sum().item()
        frames += mask.sum().item()
        loss_sum += criterion(logits, y).item() * mask.sum().item()
    return wrong / frames, loss_sum / frames


def main():
    random.seed(0); np.random.seed(0); torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_dl = DataLoader(TimitFrames("train"), 16, shuffle=True, collate_fn=pad_frames)
    dev_dl = DataLoader(TimitFrames("dev"), 16, collate_fn=pad_frames)
    net = TDNN().to(device)
    criterion = nn.CrossEntropyLoss(ignore_index=-1)
    opt = torch.optim.SGD(net.parameters(), lr=0.08, momentum=0.9)
    lr_now, previous = 0.08, None
    for epoch in range(30):
        tl = fit_one_epoch(net, train_dl, criterion, opt, device)
        fer, vl = frame_error(net, dev_dl, criterion, device)
        print(f"epoch {epoch} lr {lr_now:.4f} train {tl:.4f} dev {vl:.4f} FER {100 * fer:.2f}")
        if previous is not None and vl > previous - 0.005:
            lr_now /= 2
            for g in opt.param_groups:
                g["lr"] = lr_now
        previous = vl
        torch.save(net.state_dict(), f"tdnn_{epoch:02d}.pt")


if __name__ == "__main__":
    main()
