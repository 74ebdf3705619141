import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool

from molecules import MoleculeGraphs, collate_graphs


class GNN(nn.Module):
    def __init__(self, d_in, hidden=64):
        super().__init__()
        self.g1, self.g2 = GCNConv(d_in, hidden), GCNConv(hidden, hidden)
        self.out = nn.Linear(hidden, 1)

    def forward(self, data):
        h = self.g1(data.x, data.edge_index).relu()
        h = self.g2(h, data.edge_index).relu()
        return self.out(global_mean_pool(h, data.batch)).squeeze(1)


def epoch_mae(model, loader, device, optimizer=None):
    model.train(optimizer is not None)
    total = n = 0
    for data in loader:
        data = data.to(device)
        with torch.set_grad_enabled(optimizer is not None):
            loss = nn.functional.l1_loss(model(data), data.y)
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        total += loss.item() * data.num_graphs
        n += data.num_graphs
    return total / n


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=100)
    args = ap.parse_args()
    device = torch.device("cuda")
    train_dl = DataLoader(MoleculeGraphs("train"), 128, shuffle=True, collate_fn=collate_graphs)
    valid_dl = DataLoader(MoleculeGraphs("valid"), 256, collate_fn=collate_graphs)
    model = GNN(11).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=1e-4)
    for epoch in range(args.epochs):
        tr = epoch_mae(model, train_dl, device, optimizer)
        va = epoch_mae(model, valid_dl, device)
        print(f"{epoch} train {tr:.4f} valid {va:.4f}")


if __name__ == "__main__":
    main()
