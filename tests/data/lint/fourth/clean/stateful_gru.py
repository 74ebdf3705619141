import contextlib
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F


@contextlib.contextmanager
def evaluating(module):
    was = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield module
    finally:
        module.train(was)


class CharGRU(nn.Module):
    def __init__(self, vocab, dim=256, hid=512, layers=3):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, hid, layers, batch_first=True, dropout=0.2)
        self.norm = nn.LayerNorm(hid)
        self.out = nn.Linear(hid, vocab)

    def forward(self, x, state=None):
        y, state = self.rnn(self.emb(x), state)
        return self.out(self.norm(y)), state


class Stream:
    """Contiguous text cut into `lanes` parallel streams of `span` characters."""

    def __init__(self, ids, lanes, span):
        n = (len(ids) - 1) // lanes
        self.x = ids[: n * lanes].view(lanes, n)
        self.y = ids[1: n * lanes + 1].view(lanes, n)
        self.span = span

    def __iter__(self):
        for k in range(0, self.x.size(1) - self.span + 1, self.span):
            yield self.x[:, k:k + self.span], self.y[:, k:k + self.span]


class TBPTT:
    def __init__(self, model, lr, device):
        self.model, self.device = model.to(device), device
        self.opt = torch.optim.Adam(model.parameters(), lr=lr)
        self.sched = torch.optim.lr_scheduler.ReduceLROnPlateau(self.opt, factor=0.5, patience=1)

    def nll(self, x, y, state):
        logits, state = self.model(x.to(self.device), state)
        return F.cross_entropy(logits.flatten(0, 1), y.to(self.device).flatten()), state

    def epoch(self, stream):
        state, total, n = None, 0.0, 0
        for x, y in stream:
            if state is not None:
                state = state.detach()
            loss, state = self.nll(x, y, state)
            self.opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.opt.step()
            total, n = total + loss.item(), n + 1
        return total / n

    def score(self, stream):
        with evaluating(self.model):
            state, total, n = None, 0.0, 0
            for x, y in stream:
                loss, state = self.nll(x, y, state)
                total, n = total + loss.item(), n + 1
        return total / n

    def sample(self, start, length, temp=0.8):
        with evaluating(self.model):
            x, state, out = start.to(self.device), None, []
            for _ in range(length):
                logits, state = self.model(x, state)
                x = torch.multinomial(F.softmax(logits[:, -1] / temp, -1), 1)
                out.append(x.item())
        return out


def main():
    torch.manual_seed(11)
    raw = Path("input.txt").read_text()
    vocab = sorted(set(raw))
    stoi = {c: i for i, c in enumerate(vocab)}
    ids = torch.tensor([stoi[c] for c in raw])
    cut = int(0.95 * len(ids))
    train, val = Stream(ids[:cut], 64, 128), Stream(ids[cut:], 16, 128)
    t = TBPTT(CharGRU(len(vocab)), 2e-3, "cuda" if torch.cuda.is_available() else "cpu")
    best = float("inf")
    for e in range(40):
        tr, va = t.epoch(train), t.score(val)
        t.sched.step(va)
        print(f"{e} train {tr:.3f} val {va:.3f}", "".join(vocab[i] for i in t.sample(ids[:1].view(1, 1), 80)))
        if va < best:
            best = va
            torch.save(t.model.state_dict(), "chargru.pt")


if __name__ == "__main__":
    main()
