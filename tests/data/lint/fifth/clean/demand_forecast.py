import argparse
from pathlib import Path

import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):
    def __init__(self, series, ctx, hor):
        self.s, self.ctx, self.hor = series, ctx, hor

    def __len__(self):
        return len(self.s) - self.ctx - self.hor + 1

    def __getitem__(self, i):
        w = self.s[i:i + self.ctx + self.hor]
        return w[:self.ctx], w[self.ctx:, 0]


class PatchFormer(nn.Module):
    def __init__(self, n_feat, ctx, hor, patch=24, d=128, depth=3):
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(n_feat * patch, d)
        self.pos = nn.Parameter(torch.randn(1, ctx // patch, d) * 0.02)
        layer = nn.TransformerEncoderLayer(d, 8, 2 * d, dropout=0.2, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, depth)
        self.head = nn.Linear(d * (ctx // patch), hor)

    def forward(self, x):
        b, t, f = x.shape
        h = self.embed(x.reshape(b, t // self.patch, f * self.patch)) + self.pos
        return self.head(self.enc(h).flatten(1))


def prepare(csv, ctx, hor):
    df = pd.read_csv(csv, parse_dates=["ts"]).sort_values("ts")
    df["hour"], df["dow"] = df.ts.dt.hour / 23, df.ts.dt.dayofweek / 6
    arr = torch.tensor(df[["load", "temp", "hour", "dow"]].ffill().values, dtype=torch.float32)
    a, b = int(0.7 * len(arr)), int(0.85 * len(arr))
    mu, sd = arr[:a].mean(0), arr[:a].std(0)
    z = (arr - mu) / sd
    return [Windows(part, ctx, hor) for part in (z[:a], z[a - ctx:b], z[b - ctx:])], sd[0].item()


def mae(model, loader, device):
    model.eval()
    tot = cnt = 0.0
    with torch.inference_mode():
        for x, y in loader:
            e = (model(x.to(device)) - y.to(device)).abs()
            tot += e.sum().item()
            cnt += e.numel()
    return tot / cnt


def train(model, loaders, device, args):
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=3)
    huber = nn.HuberLoss()
    best, wait = float("inf"), 0
    for epoch in range(args.epochs):
        model.train()
        for x, y in loaders["train"]:
            opt.zero_grad()
            huber(model(x.to(device)), y.to(device)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
        val = mae(model, loaders["val"], device)
        plateau.step(val)
        fit_gap = val - mae(model, loaders["train"], device)
        print(f"{epoch:03d} val MAE {val:.4f} gap to train {fit_gap:+.4f} lr {opt.param_groups[0]['lr']:.1e}")
        if val < best - 1e-4:
            best, wait = val, 0
            torch.save(model.state_dict(), args.ckpt)
        else:
            wait += 1
            if wait >= args.patience:
                print("stopping")
                break


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--csv", type=Path, default="load.csv")
    ap.add_argument("--epochs", type=int, default=100)
    ap.add_argument("--lr", type=float, default=3e-4)
    ap.add_argument("--patience", type=int, default=8)
    ap.add_argument("--ckpt", default="patchformer.pt")
    args = ap.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ctx, hor = 168, 24
    sets, scale = prepare(args.csv, ctx, hor)
    loaders = {k: DataLoader(d, 128, shuffle=k == "train") for k, d in zip(("train", "val", "test"), sets)}
    model = PatchFormer(4, ctx, hor).to(device)
    train(model, loaders, device, args)
    model.load_state_dict(torch.load(args.ckpt))
    print(f"test MAE {mae(model, loaders['test'], device) * scale:.1f} MW")


if __name__ == "__main__":
    main()
