import random
from contextlib import contextmanager

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch.utils.data import DataLoader, Sampler
from torchvision import transforms as T


@contextmanager
def evaluating(net):
    """Switch to eval mode without gradients, and put the former mode back."""
    state = net.training
    try:
        net.eval()
        with torch.no_grad():
            yield net
    finally:
        net.train(state)


class PKSampler(Sampler):
    def __init__(self, labels, p, k, n):
        self.by = {}
        for i, l in enumerate(labels):
            self.by.setdefault(int(l), []).append(i)
        self.p, self.k, self.n = p, k, n

    def __len__(self):
        return self.n

    def __iter__(self):
        for _ in range(self.n):
            yield [i for c in random.sample(list(self.by), self.p) for i in random.choices(self.by[c], k=self.k)]


def batch_hard(emb, y, margin=0.2):
    d = torch.cdist(emb, emb)
    same = y[:, None] == y[None]
    pos = (d * same).max(1).values
    neg = d.masked_fill(same, float("inf")).min(1).values
    active = F.relu(pos - neg + margin)
    return active.mean(), (active > 0).float().mean()


class Embedder(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.f = nn.Sequential(nn.Conv2d(1, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1),
                               nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64 * 49, dim))

    def forward(self, x):
        return F.normalize(self.f(x), dim=1)


def recall_at_1(net, dl, dev):
    with evaluating(net):
        e, y = zip(*[(net(x.to(dev)), t.to(dev)) for x, t in dl])
    e, y = torch.cat(e), torch.cat(y)
    hits = 0
    for part, t in zip(e.split(1024), y.split(1024)):
        sim = part @ e.t()
        nn_idx = sim.topk(2, 1).indices[:, 1]
        hits += (y[nn_idx] == t).sum().item()
    return hits / len(y)


def main(iters=6000, every=500):
    dev = "cuda" if torch.cuda.is_available() else "cpu"
    tr = torchvision.datasets.KMNIST("data", True, T.ToTensor(), download=True)
    te = torchvision.datasets.KMNIST("data", False, T.ToTensor(), download=True)
    dl = DataLoader(tr, batch_sampler=PKSampler(tr.targets, 10, 12, iters), num_workers=2)
    probe = DataLoader(torch.utils.data.Subset(tr, range(5000)), 500)
    test = DataLoader(te, 500)
    net = Embedder().to(dev)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, iters, eta_min=1e-6)
    net.train()
    best = 0.0
    for it, (x, y) in enumerate(dl, 1):
        loss, frac = batch_hard(net(x.to(dev)), y.to(dev))
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if it % every == 0:
            r_test, r_train = recall_at_1(net, test, dev), recall_at_1(net, probe, dev)
            print(f"{it} loss {loss.item():.4f} active {frac.item():.2f} R@1 test {r_test:.3f} train {r_train:.3f} gap {r_train - r_test:.3f}")
            if r_test > best:
                best = r_test
                torch.save(net.state_dict(), "embedder.pt")


if __name__ == "__main__":
    main()
