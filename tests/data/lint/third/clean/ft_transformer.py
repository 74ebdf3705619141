import argparse
import copy

import numpy as np
import torch
from sklearn.datasets import fetch_california_housing
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import QuantileTransformer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class FeatureTokenizer(nn.Module):
    def __init__(self, n, d):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, d) * 0.05)
        self.bias = nn.Parameter(torch.zeros(n, d))
        self.cls = nn.Parameter(torch.zeros(1, 1, d))

    def forward(self, x):
        t = x[..., None] * self.weight + self.bias
        return torch.cat([self.cls.expand(len(x), -1, -1), t], 1)


class FTTransformer(nn.Module):
    def __init__(self, n, d=64, depth=3, heads=4, drop=0.1):
        super().__init__()
        self.tok = FeatureTokenizer(n, d)
        layer = nn.TransformerEncoderLayer(d, heads, 2 * d, drop, activation="gelu", batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, depth)
        self.head = nn.Sequential(nn.LayerNorm(d), nn.ReLU(), nn.Linear(d, 1))

    def forward(self, x):
        return self.head(self.enc(self.tok(x))[:, 0]).squeeze(-1)


def make_groups(model, wd):
    decay, skip, seen = [], [], set()
    for mod in model.modules():
        for name, p in mod.named_parameters(recurse=False):
            if id(p) in seen:
                continue
            seen.add(id(p))
            if isinstance(mod, (nn.LayerNorm, FeatureTokenizer)) or name.endswith("bias"):
                skip.append(p)
            else:
                decay.append(p)
    return [dict(params=decay, weight_decay=wd), dict(params=skip, weight_decay=0.0)]


class EarlyStop:
    def __init__(self, patience):
        self.patience, self.best, self.wait, self.state = patience, float("inf"), 0, None

    def __call__(self, score, model):
        if score < self.best:
            self.best, self.wait, self.state = score, 0, copy.deepcopy(model.state_dict())
        else:
            self.wait += 1
        return self.wait >= self.patience


def rmse(model, dl, dev):
    model.eval()
    se = n = 0
    with torch.no_grad():
        for x, y in dl:
            se += ((model(x.to(dev)) - y.to(dev)) ** 2).sum().item()
            n += len(y)
    return (se / n) ** 0.5


def main(a):
    torch.manual_seed(a.seed)
    dev = "cuda" if torch.cuda.is_available() else "cpu"
    X, y = fetch_california_housing(return_X_y=True)
    Xt, Xh, yt, yh = train_test_split(X, y, test_size=0.3, random_state=a.seed)
    Xv, Xs, yv, ys = train_test_split(Xh, yh, test_size=0.5, random_state=a.seed)
    qt = QuantileTransformer(output_distribution="normal").fit(Xt)
    mu, sd = yt.mean(), yt.std()
    ds = lambda X, y: TensorDataset(torch.tensor(qt.transform(X), dtype=torch.float32),
                                    torch.tensor((y - mu) / sd, dtype=torch.float32))
    tr, va, te = (DataLoader(ds(*p), a.bs, shuffle=s) for p, s in (((Xt, yt), True), ((Xv, yv), False), ((Xs, ys), False)))
    model = FTTransformer(X.shape[1]).to(dev)
    opt = torch.optim.AdamW(make_groups(model, 1e-5), lr=1e-4)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=4)
    stop = EarlyStop(16)
    for epoch in range(a.epochs):
        model.train()
        for x, t in tr:
            opt.zero_grad()
            nn.functional.mse_loss(model(x.to(dev)), t.to(dev)).backward()
            opt.step()
        v, gap = rmse(model, va, dev), rmse(model, tr, dev)
        plateau.step(v)
        print(f"{epoch:3d} val rmse {v * sd:.4f} (train {gap * sd:.4f})")
        if stop(v, model):
            break
    model.load_state_dict(stop.state)
    print("test", np.round(rmse(model, te, dev) * sd, 4))


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=200)
    p.add_argument("--bs", type=int, default=256)
    p.add_argument("--seed", type=int, default=42)
    main(p.parse_args())
