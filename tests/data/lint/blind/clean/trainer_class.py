from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader


class Trainer:
    """Generic supervised trainer with checkpointing and early stopping."""

    def __init__(self, model: nn.Module, optimizer, criterion, device="cuda", patience=5, out="runs"):
        self.model = model.to(device)
        self.optimizer = optimizer
        self.criterion = criterion
        self.device = device
        self.patience = patience
        self.out = Path(out)
        self.out.mkdir(exist_ok=True)

    def _forward(self, batch):
        inputs, targets = (t.to(self.device) for t in batch)
        return self.criterion(self.model(inputs), targets), targets.size(0)

    def _train_epoch(self, loader: DataLoader) -> float:
        self.model.train()
        total, n = 0.0, 0
        for batch in loader:
            self.optimizer.zero_grad()
            loss, k = self._forward(batch)
            loss.backward()
            self.optimizer.step()
            total += loss.item() * k
            n += k
        return total / n

    @torch.no_grad()
    def _valid_epoch(self, loader: DataLoader) -> float:
        self.model.eval()
        total, n = 0.0, 0
        for batch in loader:
            loss, k = self._forward(batch)
            total += loss.item() * k
            n += k
        return total / n

    def fit(self, train: DataLoader, valid: DataLoader, epochs: int):
        best, bad = float("inf"), 0
        for epoch in range(epochs):
            tr, va = self._train_epoch(train), self._valid_epoch(valid)
            print(f"epoch {epoch}: train {tr:.4f} valid {va:.4f}")
            if va < best:
                best, bad = va, 0
                torch.save(self.model.state_dict(), self.out / "best.pt")
            else:
                bad += 1
                if bad > self.patience:
                    break
        return best


def main():
    from tabular import load_split

    net = nn.Sequential(nn.Linear(30, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    trainer = Trainer(net, opt, nn.SmoothL1Loss(), device="cpu")
    trainer.fit(DataLoader(load_split("train"), 64, shuffle=True), DataLoader(load_split("valid"), 256), epochs=50)


if __name__ == "__main__":
    main()
