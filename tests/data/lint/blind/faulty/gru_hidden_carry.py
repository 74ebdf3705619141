import torch
import torch.nn as nn

from sensors import contiguous_segments


class SensorGRU(nn.Module):
    def __init__(self, n_in, n_hidden=128):
        super().__init__()
        self.gru = nn.GRU(n_in, n_hidden, batch_first=True)
        self.out = nn.Linear(n_hidden, n_in)

    def forward(self, x, h=None):
        y, h = self.gru(x, h)
        return self.out(y), h


def train(model, segments, optimizer, criterion):
    model.train()
    hidden = None
    total = 0.0
    for x, target in segments:
        optimizer.zero_grad()
        pred, hidden = model(x, hidden)
        loss = criterion(pred, target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
    return total / len(segments)


def evaluate(model, segments, criterion):
    model.eval()
    hidden, total = None, 0.0
    with torch.no_grad():
        for x, target in segments:
            pred, hidden = model(x, hidden)
            total += criterion(pred, target).item()
    return total / len(segments)


def main():
    train_segments = contiguous_segments("train", length=50, batch=16)
    test_segments = contiguous_segments("test", length=50, batch=16)
    model = SensorGRU(n_in=train_segments.channels)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.MSELoss()
    for epoch in range(30):
        tr = train(model, train_segments, optimizer, criterion)
        te = evaluate(model, test_segments, criterion)
        print(f"epoch {epoch}: train {tr:.5f} test {te:.5f}")


if __name__ == "__main__":
    main()
