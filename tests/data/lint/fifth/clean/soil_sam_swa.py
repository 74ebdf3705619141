"""Soil texture classes from VNIR spectra; sharpness-aware steps, weight averaging at the end."""
import pandas as pd
import torch
import torch.nn as nn
from sklearn.model_selection import StratifiedKFold
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset


class SharpAware:
    """Climb to the worst neighbour, take the gradient there, descend from the origin."""

    def __init__(self, base, rho=0.05):
        self.base, self.rho = base, rho
        self.params = [p for g in base.param_groups for p in g["params"]]

    @torch.no_grad()
    def climb(self):
        norm = torch.stack([p.grad.norm() for p in self.params if p.grad is not None]).norm() + 1e-12
        self.shift = []
        for p in self.params:
            e = p.grad * (self.rho / norm) if p.grad is not None else None
            if e is not None:
                p.add_(e)
            self.shift.append(e)
        self.base.zero_grad()

    @torch.no_grad()
    def descend(self):
        for p, e in zip(self.params, self.shift):
            if e is not None:
                p.sub_(e)
        self.base.step()
        self.base.zero_grad()


def network(n_in, n_out):
    return nn.Sequential(nn.Linear(n_in, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.3),
                         nn.Linear(256, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, n_out))


@torch.no_grad()
def score(net, x, y):
    net.eval()
    return (net(x).softmax(-1).argmax(-1) == y).float().mean().item()


def one_fold(x, y, tr, te, epochs=120, swa_from=90):
    loader = DataLoader(TensorDataset(x[tr], y[tr]), 64, shuffle=True, drop_last=True)
    net = network(x.size(1), int(y.max()) + 1)
    avg = AveragedModel(net)
    base = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    sam = SharpAware(base)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(base, T_max=swa_from)
    flat = SWALR(base, swa_lr=0.01, anneal_epochs=5)
    ce = nn.CrossEntropyLoss(label_smoothing=0.1)
    for ep in range(epochs):
        net.train()
        for xb, yb in loader:
            ce(net(xb), yb).backward()
            sam.climb()
            ce(net(xb), yb).backward()
            sam.descend()
        if ep >= swa_from:
            avg.update_parameters(net)
            flat.step()
        else:
            cosine.step()
    update_bn(loader, avg)
    return score(net, x[te], y[te]), score(avg, x[te], y[te])


def main():
    df = pd.read_csv("lucas_vnir.csv")
    x = torch.tensor(df.filter(like="nm_").values, dtype=torch.float32)
    y = torch.tensor(df["texture"].astype("category").cat.codes.values, dtype=torch.long)
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    rows = []
    for k, (tr, te) in enumerate(folds.split(x, y)):
        torch.manual_seed(k)
        mean, std = x[tr].mean(0), x[tr].std(0) + 1e-6
        plain, swa = one_fold((x - mean) / std, y, torch.tensor(tr), torch.tensor(te))
        rows.append((plain, swa))
        print(f"fold {k}: last {plain:.4f} averaged {swa:.4f}")
    print("mean", torch.tensor(rows).mean(0).tolist())


if __name__ == "__main__":
    main()
