"""Non-intrusive load monitoring: mains power -> appliance power, sequence to point."""
import logging
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
W = 599


class Meter(Dataset):
    def __init__(self, house, appliance):
        z = np.load(f"redd/{house}_{appliance}.npz")
        self.x = torch.from_numpy((z["mains"] - 522) / 814).float()
        self.y = torch.from_numpy((z["app"] - 700) / 1000).float()

    def __len__(self):
        return len(self.x) - W + 1

    def __getitem__(self, i):
        return self.x[i:i + W][None], self.y[i + W // 2]


class Seq2Point(nn.Module):
    def __init__(self):
        super().__init__()
        spec = [(1, 30, 10), (30, 30, 8), (30, 40, 6), (40, 50, 5), (50, 50, 5)]
        self.conv = nn.Sequential(*[m for i, o, k in spec for m in (nn.Conv1d(i, o, k), nn.ReLU())])
        with torch.no_grad():
            n = self.conv(torch.zeros(1, 1, W)).numel()
        self.fc = nn.Sequential(nn.Flatten(), nn.Linear(n, 1024), nn.ReLU(), nn.Dropout(0.2), nn.Linear(1024, 1))

    def forward(self, x):
        return self.fc(self.conv(x)).squeeze(-1)


class Updater:
    def __init__(self, net, lr, clip):
        self.net, self.clip = net, clip
        self.opt = torch.optim.Adam(net.parameters(), lr=lr)
        self.n = 0

    def push(self, loss):
        loss.backward()
        self.limit()
        self.opt.zero_grad()
        self.opt.step()
        self.n += 1

    def limit(self):
        return nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)


def validate(net, loader, dev):
    net.eval()
    err, n = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            err += (net(x.to(dev)) - y.to(dev)).abs().sum().item()
            n += y.numel()
    return 1000 * err / n


def main():
    dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train = DataLoader(Meter("house_1", "kettle"), 1000, shuffle=True, num_workers=4)
    val = DataLoader(Meter("house_3", "kettle"), 2000, num_workers=2)
    net = Seq2Point().to(dev)
    up = Updater(net, lr=1e-3, clip=5.0)
    mse = nn.MSELoss()
    best, patience = float("inf"), 0
    for ep in range(50):
        t0 = time.time()
        net.train()
        total = 0.0
        for x, y in train:
            loss = mse(net(x.to(dev)), y.to(dev))
            up.push(loss)
            total += loss.item()
        mae = validate(net, val, dev)
        logging.info("epoch %d mse %.5f val MAE %.1f W (%.0fs)", ep, total / len(train), mae, time.time() - t0)
        if mae < best:
            best, patience = mae, 0
            torch.save(net.state_dict(), "s2p_kettle.pt")
        else:
            patience += 1
        if patience == 5:
            break


if __name__ == "__main__":
    main()
