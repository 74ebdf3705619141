import argparse
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class StrokeRNN(nn.Module):
    """Predicts the next pen offset with a Gaussian mixture."""

    def __init__(self, h=256, k=10):
        super().__init__()
        self.k = k
        self.gru = nn.GRU(3, h, 2, batch_first=True)
        self.out = nn.Linear(h, 5 * k + 1)

    def forward(self, x, state):
        y, state = self.gru(x, state)
        return self.out(y), state


def mixture_nll(params, target, k):
    pen, rest = params[..., -1], params[..., :-1]
    logit, mx, my, sx, sy = rest.split(k, -1)
    dx, dy = target[..., 0:1], target[..., 1:2]
    sx, sy = sx.clamp(-5, 5), sy.clamp(-5, 5)
    lp = -0.5 * (((dx - mx) / sx.exp()) ** 2 + ((dy - my) / sy.exp()) ** 2) - sx - sy - math.log(2 * math.pi)
    nll = -torch.logsumexp(F.log_softmax(logit, -1) + lp, -1).mean()
    return nll + F.binary_cross_entropy_with_logits(pen, target[..., 2])


def streams(path, batch):
    arr = torch.from_numpy(np.load(path).astype(np.float32))
    n = len(arr) // batch
    return arr[:n * batch].view(batch, n, 3)


def chunks(data, size):
    for i in range(0, data.size(1) - size - 1, size):
        yield data[:, i:i + size], data[:, i + 1:i + size + 1]


@torch.no_grad()
def evaluate(model, data, size, device):
    model.eval()
    state, vals = None, []
    for x, y in chunks(data, size):
        p, state = model(x.to(device), state)
        vals.append(mixture_nll(p, y.to(device), model.k).item())
    return sum(vals) / len(vals)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--bptt", type=int, default=100)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--epochs", type=int, default=40)
    args = ap.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train, val = streams("strokes_train.npy", args.batch), streams("strokes_val.npy", args.batch)
    model = StrokeRNN().to(device)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.95)
    for epoch in range(args.epochs):
        model.train()
        state = torch.zeros(2, args.batch, 256, device=device)
        total = n = 0
        for x, y in chunks(train, args.bptt):
            opt.zero_grad()
            p, state = model(x.to(device), state)
            loss = mixture_nll(p, y.to(device), model.k)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            total += loss.item()
            n += 1
        sched.step()
        print(f"{epoch} train {total / n:.4f} val {evaluate(model, val, args.bptt, device):.4f}")
    torch.save(model.state_dict(), "strokes.pt")


if __name__ == "__main__":
    main()
