"""Copy task for gated recurrent networks."""
import argparse

import torch
import torch.nn as nn


def get_args():
    ap = argparse.ArgumentParser()
    ap.add_argument("--delay", type=int, default=200)
    ap.add_argument("--hidden", type=int, default=128)
    ap.add_argument("--cell", choices=["gru", "lstm"], default="gru")
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--clip", type=float, default=1e6)
    ap.add_argument("--iters", type=int, default=20000)
    ap.add_argument("--batch", type=int, default=64)
    return ap.parse_args()


def make_batch(n, delay, length=10, symbols=8):
    seq = torch.randint(1, symbols + 1, (n, length))
    blank = torch.zeros(n, delay - 1, dtype=torch.long)
    go = torch.full((n, 1), symbols + 1)
    x = torch.cat([seq, blank, go, torch.zeros(n, length, dtype=torch.long)], 1)
    y = torch.cat([torch.zeros(n, length + delay, dtype=torch.long), seq], 1)
    return x, y


class Copier(nn.Module):
    def __init__(self, cell, hidden, symbols=8):
        super().__init__()
        self.emb = nn.Embedding(symbols + 2, 32)
        self.rnn = {"gru": nn.GRU, "lstm": nn.LSTM}[cell](32, hidden, batch_first=True)
        self.out = nn.Linear(hidden, symbols + 1)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


@torch.no_grad()
def recall(model, delay, device):
    model.eval()
    x, y = make_batch(512, delay)
    pred = model(x.to(device)).argmax(-1).cpu()
    model.train()
    return (pred[:, -10:] == y[:, -10:]).float().mean().item()


def main():
    args = get_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Copier(args.cell, args.hidden).to(device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=args.lr, alpha=0.9)
    criterion = nn.CrossEntropyLoss()
    model.train()
    for it in range(1, args.iters + 1):
        x, y = make_batch(args.batch, args.delay)
        loss = criterion(model(x.to(device)).flatten(0, 1), y.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        if it % 250 == 0:
            print(f"{it} loss {loss.item():.5f} gnorm {norm.item():.3f} recall {recall(model, args.delay, device):.3f}")


if __name__ == "__main__":
    main()
