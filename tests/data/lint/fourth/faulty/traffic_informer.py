import argparse
import os

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):
    def __init__(self, arr, seq, horizon):
        self.arr, self.seq, self.h = torch.tensor(arr, dtype=torch.float32), seq, horizon

    def __len__(self):
        return len(self.arr) - self.seq - self.h + 1

    def __getitem__(self, i):
        return self.arr[i:i + self.seq], self.arr[i + self.seq:i + self.seq + self.h]


class PatchForecaster(nn.Module):
    def __init__(self, seq, horizon, patch=16, dim=128, depth=3):
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(patch, dim)
        self.pos = nn.Parameter(torch.zeros(seq // patch, dim))
        layer = nn.TransformerEncoderLayer(dim, 8, 256, 0.2, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, depth)
        self.out = nn.Linear(dim * (seq // patch), horizon)

    def forward(self, x):
        B, L, C = x.shape
        mean, std = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-5
        z = ((x - mean) / std).permute(0, 2, 1).reshape(B * C, L // self.patch, self.patch)
        h = self.enc(self.embed(z) + self.pos).flatten(1)
        return self.out(h).view(B, C, -1).permute(0, 2, 1) * std + mean


class Exp:
    def __init__(self, args):
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        raw = np.load(args.data)
        a, b = int(0.7 * len(raw)), int(0.8 * len(raw))
        mu, sd = raw[:a].mean(0), raw[:a].std(0) + 1e-6
        raw = (raw - mu) / sd
        cut = {"train": raw[:a], "val": raw[a:b], "test": raw[b:]}
        self.dl = {k: DataLoader(Windows(v, args.seq, args.horizon), args.bs, shuffle=k == "train") for k, v in cut.items()}
        self.model = PatchForecaster(args.seq, args.horizon).to(self.device)
        self.crit = nn.MSELoss()

    def _step_loss(self, x, y):
        return self.crit(self.model(x.to(self.device)), y.to(self.device))

    def vali(self, split):
        self.model.eval()
        total = []
        for x, y in self.dl[split]:
            loss = self._step_loss(x, y)
            total.append(loss.item())
        self.model.train()
        return float(np.mean(total))

    def train(self):
        opt = torch.optim.Adam(self.model.parameters(), lr=self.args.lr)
        sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
        best, wait = float("inf"), 0
        for epoch in range(self.args.epochs):
            self.model.train()
            losses = []
            for x, y in self.dl["train"]:
                opt.zero_grad()
                loss = self._step_loss(x, y)
                loss.backward()
                opt.step()
                losses.append(loss.item())
            val, test = self.vali("val"), self.vali("test")
            sched.step()
            print(f"Epoch {epoch + 1} train {np.mean(losses):.5f} val {val:.5f} test {test:.5f}")
            if val < best:
                best, wait = val, 0
                torch.save(self.model.state_dict(), os.path.join(self.args.out, "ckpt.pth"))
            else:
                wait += 1
                if wait >= self.args.patience:
                    print("early stop")
                    break


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--data", default="traffic.npy")
    p.add_argument("--out", default=".")
    p.add_argument("--seq", type=int, default=336)
    p.add_argument("--horizon", type=int, default=96)
    p.add_argument("--bs", type=int, default=32)
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--epochs", type=int, default=20)
    p.add_argument("--patience", type=int, default=3)
    Exp(p.parse_args()).train()
