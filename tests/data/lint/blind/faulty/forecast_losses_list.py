import torch
from torch import nn
from torch.utils.data import DataLoader

from electricity import SlidingWindows


class TCN(nn.Module):
    def __init__(self, features, horizon, ch=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(features, ch, 3, padding=2, dilation=2), nn.ReLU(),
            nn.Conv1d(ch, ch, 3, padding=4, dilation=4), nn.ReLU(),
            nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(ch, horizon))

    def forward(self, x):
        return self.net(x.transpose(1, 2))


def fit(model, train_dl, optimizer, loss_fn, epochs):
    history = []
    for epoch in range(epochs):
        model.train()
        for past, future in train_dl:
            optimizer.zero_grad()
            loss = loss_fn(model(past), future)
            loss.backward()
            optimizer.step()
            history.append(loss)
        recent = history[-len(train_dl):]
        print(f"epoch {epoch}: mae {torch.stack(recent).mean().item():.4f}")
    return history


def backtest(model, loader, loss_fn):
    model.eval()
    with torch.no_grad():
        errs = [loss_fn(model(past), future).item() for past, future in loader]
    return sum(errs) / len(errs)


def main():
    train_dl = DataLoader(SlidingWindows("train", past=168, horizon=24), 256, shuffle=True)
    test_dl = DataLoader(SlidingWindows("test", past=168, horizon=24), 256)
    model = TCN(features=12, horizon=24)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn = nn.L1Loss()
    fit(model, train_dl, optimizer, loss_fn, epochs=20)
    print("test mae", backtest(model, test_dl, loss_fn))


if __name__ == "__main__":
    main()
