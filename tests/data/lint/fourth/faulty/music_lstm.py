import argparse
import pickle
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F


class NoteLSTM(nn.Module):
    def __init__(self, vocab, dim=192, hid=512, layers=2, p=0.3):
        super().__init__()
        self.layers, self.hid = layers, hid
        self.emb = nn.Embedding(vocab, dim)
        self.lstm = nn.LSTM(dim, hid, layers, dropout=p, batch_first=True)
        self.out = nn.Linear(hid, vocab)

    def forward(self, x, state):
        y, state = self.lstm(self.emb(x), state)
        return self.out(y), state

    def zero_state(self, n, device):
        z = torch.zeros(self.layers, n, self.hid, device=device)
        return z, z.clone()


class MusicTrainer:
    def __init__(self, model, args, device):
        self.model, self.args, self.device = model.to(device), args, device
        self.opt = torch.optim.RMSprop(model.parameters(), lr=args.lr)
        self.sched = torch.optim.lr_scheduler.StepLR(self.opt, 10, 0.5)

    def segments(self, ids):
        n = (len(ids) - 1) // self.args.lanes
        x = ids[: n * self.args.lanes].view(self.args.lanes, n)
        y = ids[1: n * self.args.lanes + 1].view(self.args.lanes, n)
        for k in range(0, n - self.args.bptt, self.args.bptt):
            yield x[:, k:k + self.args.bptt].to(self.device), y[:, k:k + self.args.bptt].to(self.device)

    def loss(self, x, y, state):
        logits, state = self.model(x, state)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()), state

    def train_epoch(self, ids):
        self.model.train()
        state = self.model.zero_state(self.args.lanes, self.device)
        total = n = 0
        for x, y in self.segments(ids):
            self.opt.zero_grad()
            loss, state = self.loss(x, y, state)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.opt.step()
            total += loss.item()
            n += 1
        self.sched.step()
        return total / n

    @torch.no_grad()
    def validate(self, ids):
        self.model.eval()
        state = self.model.zero_state(self.args.lanes, self.device)
        total = n = 0
        for x, y in self.segments(ids):
            loss, state = self.loss(x, y, state)
            total += loss.item()
            n += 1
        return total / n


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--notes", type=Path, default=Path("notes.pkl"))
    p.add_argument("--lanes", type=int, default=32)
    p.add_argument("--bptt", type=int, default=64)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--epochs", type=int, default=40)
    args = p.parse_args()
    torch.manual_seed(8)
    notes = pickle.loads(args.notes.read_bytes())
    vocab = {t: i for i, t in enumerate(sorted(set(notes)))}
    ids = torch.tensor([vocab[t] for t in notes])
    cut = int(0.9 * len(ids))
    tr = MusicTrainer(NoteLSTM(len(vocab)), args, "cuda" if torch.cuda.is_available() else "cpu")
    best = float("inf")
    for e in range(args.epochs):
        t, v = tr.train_epoch(ids[:cut]), tr.validate(ids[cut:])
        print(f"epoch {e} train {t:.3f} val {v:.3f}")
        if v < best:
            best = v
            torch.save({"model": tr.model.state_dict(), "vocab": vocab}, "music.pt")


if __name__ == "__main__":
    main()
