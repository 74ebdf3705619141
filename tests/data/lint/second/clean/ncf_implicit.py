import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Interactions(Dataset):
    """Positive pairs with freshly drawn negatives every epoch."""

    def __init__(self, pairs, n_items, seen, num_ng=4):
        self.pairs, self.n_items, self.seen, self.num_ng = pairs, n_items, seen, num_ng
        self.resample()

    def resample(self):
        rows = []
        for u, i in self.pairs:
            rows.append((u, i, 1.0))
            for _ in range(self.num_ng):
                j = np.random.randint(self.n_items)
                while (u, j) in self.seen:
                    j = np.random.randint(self.n_items)
                rows.append((u, j, 0.0))
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, k):
        return self.rows[k]


class NeuMF(nn.Module):
    def __init__(self, n_users, n_items, d=32):
        super().__init__()
        self.gu, self.gi = nn.Embedding(n_users, d), nn.Embedding(n_items, d)
        self.mu, self.mi = nn.Embedding(n_users, d), nn.Embedding(n_items, d)
        self.mlp = nn.Sequential(nn.Linear(2 * d, d), nn.ReLU(), nn.Dropout(0.1), nn.Linear(d, d // 2), nn.ReLU())
        self.out = nn.Linear(d + d // 2, 1)
        for e in (self.gu, self.gi, self.mu, self.mi):
            nn.init.normal_(e.weight, std=0.01)

    def forward(self, u, i):
        g = self.gu(u) * self.gi(i)
        m = self.mlp(torch.cat([self.mu(u), self.mi(i)], -1))
        return self.out(torch.cat([g, m], -1)).squeeze(-1)


def hit_ratio(model, test, k=10, device="cpu"):
    was_training = model.training
    model.eval()
    hits = []
    with torch.no_grad():
        for user, candidates in test.items():
            items = torch.tensor(candidates, device=device)
            users = torch.full_like(items, user)
            prob = torch.sigmoid(model(users, items))
            top = prob.topk(k).indices
            hits.append(float((top == 0).any()))
    model.train(was_training)
    return float(np.mean(hits))


def main():
    np.random.seed(0)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    df = pd.read_csv("ratings.csv")
    df["user"] = df.user.astype("category").cat.codes
    df["item"] = df.item.astype("category").cat.codes
    n_users, n_items = int(df.user.max()) + 1, int(df.item.max()) + 1
    last = df.sort_values("timestamp").groupby("user").tail(1)
    train_df = df.drop(last.index)
    seen = set(zip(df.user, df.item))
    test = {int(u): [int(i)] + np.random.randint(0, n_items, 99).tolist() for u, i in zip(last.user, last.item)}

    ds = Interactions(list(zip(train_df.user, train_df.item)), n_items, seen)
    loader = DataLoader(ds, batch_size=1024, shuffle=True)
    model = NeuMF(n_users, n_items).to(device)
    loss_fn = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    best = 0.0
    model.train()
    for epoch in range(20):
        ds.resample()
        seen_loss = 0.0
        for u, i, y in loader:
            u, i, y = u.to(device), i.to(device), y.float().to(device)
            optimizer.zero_grad()
            loss = loss_fn(model(u, i), y)
            loss.backward()
            optimizer.step()
            seen_loss += loss.item() * len(y)
        hr = hit_ratio(model, test, device=device)
        print(f"epoch {epoch:02d} loss {seen_loss / len(ds):.4f} HR@10 {hr:.4f}")
        if hr > best:
            best = hr
            torch.save(model.state_dict(), "neumf.pt")


if __name__ == "__main__":
    main()
