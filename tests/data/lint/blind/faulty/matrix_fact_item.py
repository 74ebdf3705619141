import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

from movielens import ratings_split


class Factorizer(nn.Module):
    def __init__(self, users, items, k=64):
        super().__init__()
        self.u, self.i = nn.Embedding(users, k), nn.Embedding(items, k)
        self.bu, self.bi = nn.Embedding(users, 1), nn.Embedding(items, 1)
        nn.init.normal_(self.u.weight, std=0.05)
        nn.init.normal_(self.i.weight, std=0.05)

    def forward(self, u, i):
        dot = (self.u(u) * self.i(i)).sum(1)
        return dot + self.bu(u).squeeze(1) + self.bi(i).squeeze(1)


def main():
    (tu, ti, tr), (vu, vi, vr), n_users, n_items = ratings_split("ml-1m")
    model = Factorizer(n_users, n_items)
    mse = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-6)
    loader = DataLoader(TensorDataset(tu, ti, tr), batch_size=2048, shuffle=True)
    for epoch in range(25):
        model.train()
        epoch_loss = 0.0
        for u, i, r in loader:
            optimizer.zero_grad()
            pred = model(u, i)
            loss = mse(pred, r).detach()
            loss.requires_grad_(True)
            loss.backward()
            optimizer.step()
            epoch_loss += loss.item()
        model.eval()
        with torch.no_grad():
            rmse = mse(model(vu, vi), vr).sqrt().item()
        print(f"epoch {epoch:2d} train {epoch_loss / len(loader):.4f} rmse {rmse:.4f}")


if __name__ == "__main__":
    main()
