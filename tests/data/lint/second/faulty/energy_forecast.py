"""Stateful LSTM forecaster over contiguous windows of an hourly load series."""
import pandas as pd
import torch
import torch.nn as nn

LAGS, ROWS, EPOCHS = 48, 16, 25


def contiguous(series, rows):
    n = len(series) // rows
    return torch.tensor(series[:n * rows], dtype=torch.float32).view(rows, n, 1)


class Forecaster(nn.Module):
    def __init__(self, hidden=96):
        super().__init__()
        self.lstm = nn.LSTM(1, hidden, 2, batch_first=True, dropout=0.1)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x, state=None):
        h, state = self.lstm(x, state)
        return self.out(h), state


class Runner:
    def __init__(self, train, valid, device):
        self.train_x, self.valid_x = train.to(device), valid.to(device)
        self.model = Forecaster().to(device)
        self.loss_fn = nn.SmoothL1Loss()
        self.opt = torch.optim.Adam(self.model.parameters(), lr=2e-3)
        self.sched = torch.optim.lr_scheduler.StepLR(self.opt, 10, 0.3)

    def windows(self, data):
        for s in range(0, data.size(1) - LAGS - 1, LAGS):
            yield data[:, s:s + LAGS], data[:, s + 1:s + LAGS + 1]

    def train_epoch(self):
        self.model.train()
        state, total, n = None, 0.0, 0
        for x, y in self.windows(self.train_x):
            self.opt.zero_grad()
            pred, state = self.model(x, state)
            loss = self.loss_fn(pred, y)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.opt.step()
            total += loss.item()
            n += 1
        self.sched.step()
        return total / n

    @torch.no_grad()
    def valid_loss(self):
        self.model.eval()
        state, out = None, []
        for x, y in self.windows(self.valid_x):
            pred, state = self.model(x, state)
            out.append(self.loss_fn(pred, y).item())
        return sum(out) / len(out)


def main():
    torch.manual_seed(0)
    df = pd.read_csv("load_hourly.csv", parse_dates=["time"]).sort_values("time")
    values = df["mw"].to_numpy()
    cut = int(0.8 * len(values))
    mu, sd = values[:cut].mean(), values[:cut].std()
    z = (values - mu) / sd
    runner = Runner(contiguous(z[:cut], ROWS), contiguous(z[cut:], ROWS), "cuda" if torch.cuda.is_available() else "cpu")
    for epoch in range(EPOCHS):
        a, b = runner.train_epoch(), runner.valid_loss()
        print(f"epoch {epoch} train {a:.5f} valid {b:.5f}")
    torch.save({"model": runner.model.state_dict(), "mu": mu, "sd": sd}, "forecast.pt")


if __name__ == "__main__":
    main()
