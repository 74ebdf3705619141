import copy
import random

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEED = 1234
random.seed(SEED)
np.random.seed(SEED)
torch.manual_seed(SEED)


def read_frames():
    df = pd.concat([pd.read_csv("winequality-red.csv", sep=";").assign(red=1),
                    pd.read_csv("winequality-white.csv", sep=";").assign(red=0)])
    df = df.sample(frac=1.0, random_state=SEED)
    n = int(0.8 * len(df))
    return df.iloc[:n], df.iloc[n:]


def as_dataset(df, mean, std):
    x = torch.tensor(((df.drop(columns="quality") - mean) / std).values, dtype=torch.float32)
    y = torch.tensor(df["quality"].values - 3, dtype=torch.float32)
    return TensorDataset(x, y)


class Ordinal(nn.Module):
    """Cumulative-link model: one score, learned increasing cut points."""

    def __init__(self, n_in, levels=7):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(n_in, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
        self.first = nn.Parameter(torch.tensor(-3.0))
        self.gaps = nn.Parameter(torch.zeros(levels - 2))

    def forward(self, x):
        cuts = torch.cat([self.first[None], self.first + nn.functional.softplus(self.gaps).cumsum(0)])
        return self.score(x) - cuts


def ordinal_loss(logits, y):
    k = torch.arange(logits.size(1), device=y.device)
    return nn.functional.binary_cross_entropy_with_logits(logits, (y[:, None] > k).float())


def mae(model, loader):
    model.eval()
    with torch.inference_mode():
        errs = [((torch.sigmoid(model(x)) > 0.5).sum(1) - y).abs() for x, y in loader]
    return torch.cat(errs).mean().item()


def main():
    train_df, test_df = read_frames()
    feats = train_df.drop(columns="quality")
    mean, std = feats.mean(), feats.std()
    train_ds, val_ds = as_dataset(train_df, mean, std), as_dataset(test_df, mean, std)
    train_loader = DataLoader(train_ds, batch_size=64, shuffle=True)
    val_loader = DataLoader(train_ds, batch_size=256)
    model = Ordinal(train_ds.tensors[0].size(1))
    opt = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=5)
    best, state, stale = float("inf"), None, 0
    for epoch in range(200):
        model.train()
        tot = 0.0
        for x, y in train_loader:
            loss = ordinal_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            tot += loss.item()
        val = mae(model, val_loader)
        sched.step(val)
        print(f"{epoch} loss {tot / len(train_loader):.4f} val MAE {val:.4f}")
        if val < best:
            best, state, stale = val, copy.deepcopy(model.state_dict()), 0
        else:
            stale += 1
        if stale >= 15:
            break
    torch.save(state, "wine.pt")
    print("best val MAE", best, "of", len(val_ds), "held-out wines")


if __name__ == "__main__":
    main()
