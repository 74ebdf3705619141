import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from interactions import Interactions, load_split


class Tower(nn.Module):
    def __init__(self, n, dim):
        super().__init__()
        self.emb = nn.Embedding(n, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))

    def forward(self, i):
        return F.normalize(self.mlp(self.emb(i)), dim=-1)


class TwoTower(nn.Module):
    def __init__(self, nu, ni, dim=64):
        super().__init__()
        self.user, self.item = Tower(nu, dim), Tower(ni, dim)
        self.log_tau = nn.Parameter(torch.tensor(2.6))

    def forward(self, u, i):
        return self.user(u) @ self.item(i).t() * self.log_tau.exp()


def in_batch_loss(logits):
    y = torch.arange(len(logits), device=logits.device)
    return 0.5 * (F.cross_entropy(logits, y) + F.cross_entropy(logits.t(), y))


class Steps:
    def __init__(self, model, opts, max_norm):
        self.model, self.opts, self.max_norm = model, opts, max_norm

    def train_step(self, u, i):
        for o in self.opts.values():
            o.zero_grad(set_to_none=True)
        loss = in_batch_loss(self.model(u, i))
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        for o in self.opts.values():
            o.step()
        return loss.item()


@torch.no_grad()
def recall_at(model, loader, n_items, device, k=50):
    model.eval()
    items = model.item(torch.arange(n_items, device=device))
    hit = n = 0
    for u, i in loader:
        top = (model.user(u.to(device)) @ items.t()).topk(k, dim=1).indices
        hit += (top == i.to(device).unsqueeze(1)).any(1).sum().item()
        n += len(u)
    return hit / n


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--dim", type=int, default=64)
    p.add_argument("--epochs", type=int, default=20)
    p.add_argument("--bs", type=int, default=2048)
    args = p.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train, val, nu, ni = load_split("data/ratings.parquet")
    train_dl = DataLoader(Interactions(train), args.bs, shuffle=True, drop_last=True)
    val_dl = DataLoader(Interactions(val), args.bs)
    model = TwoTower(nu, ni, args.dim).to(device)
    tables = [model.user.emb.weight, model.item.emb.weight]
    ids = {id(t) for t in tables}
    opts = {
        "emb": torch.optim.Adagrad(tables, lr=0.05),
        "dense": torch.optim.Adam([q for q in model.parameters() if id(q) not in ids], lr=1e-3),
    }
    steps = Steps(model, opts, 5.0)
    best = 0.0
    for e in range(args.epochs):
        model.train()
        losses = [steps.train_step(u.to(device), i.to(device)) for u, i in train_dl]
        r = recall_at(model, val_dl, ni, device)
        print(f"epoch {e}: loss {sum(losses) / len(losses):.4f} recall@50 {r:.4f}")
        if r > best:
            best = r
            torch.save(model.state_dict(), "two_tower.pt")


if __name__ == "__main__":
    main()
