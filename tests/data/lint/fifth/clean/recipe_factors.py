"""Implicit-feedback recipe recommender: factor embeddings trained with BPR."""
import numpy as np
import pandas as pd
import torch
from torch import nn
import torch.nn.functional as F


class Factors(nn.Module):
    def __init__(self, users, items, k=64):
        super().__init__()
        self.u = nn.Embedding(users, k, sparse=True)
        self.i = nn.Embedding(items, k, sparse=True)
        self.bias = nn.Parameter(torch.zeros(items))
        for e in (self.u, self.i):
            nn.init.normal_(e.weight, std=0.05)

    def forward(self, u, i):
        return (self.u(u) * self.i(i)).sum(-1) + self.bias[i]

    def rank_all(self, u):
        return self.u(u) @ self.i.weight.t() + self.bias


def load(path, holdout_per_user=1):
    df = pd.read_csv(path).sort_values(["user", "ts"])
    df["rank"] = df.groupby("user").cumcount(ascending=False)
    test = df[df["rank"] < holdout_per_user]
    train = df[df["rank"] >= holdout_per_user]
    return train, test, df.user.max() + 1, df.recipe.max() + 1


def recall_at(net, train, test, k=20):
    net.eval()
    seen = train.groupby("user").recipe.apply(np.array)
    hits = 0
    with torch.no_grad():
        for user, rec in zip(test.user.values, test.recipe.values):
            score = net.rank_all(torch.tensor([user])).squeeze(0)
            if user in seen.index:
                score[torch.from_numpy(seen.loc[user])] = -1e9
            hits += int(rec in score.topk(k).indices.tolist())
    return hits / len(test)


def fit(net, train, n_items, epochs=15, bs=4096):
    sparse = torch.optim.SparseAdam([net.u.weight, net.i.weight], lr=1e-2)
    dense = torch.optim.Adam([net.bias], lr=1e-2)
    users = torch.from_numpy(train.user.values)
    items = torch.from_numpy(train.recipe.values)
    for ep in range(epochs):
        net.train()
        order = torch.randperm(len(users))
        agg, n = 0.0, 0
        for idx in order.split(bs):
            u, pos = users[idx], items[idx]
            neg = torch.randint(0, n_items, pos.shape)
            margin = net(u, pos) - net(u, neg)
            loss = F.softplus(-margin).mean()
            for o in (sparse, dense):
                o.zero_grad()
            loss.backward()
            sparse.step()
            dense.step()
            agg += loss.item() * len(idx)
            n += len(idx)
        yield ep, agg / n


def main():
    torch.manual_seed(2024)
    train, test, n_users, n_items = load("interactions.csv")
    net = Factors(n_users, n_items)
    for ep, bpr in fit(net, train, n_items):
        if ep % 3 == 2:
            print(f"epoch {ep} bpr {bpr:.4f} recall@20 {recall_at(net, train, test):.4f}")
    torch.save(net.state_dict(), "recipe_factors.pt")


if __name__ == "__main__":
    main()
