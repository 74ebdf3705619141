# Classify surnames by language with a hand-written RNN cell.
import random
import string
import time
import unicodedata
from glob import glob

import torch
import torch.nn as nn

ALL = string.ascii_letters + " .,;'"
N_LETTERS = len(ALL)
lr = 0.005
n_iters = 100000
print_every = 5000


def to_ascii(s):
    return "".join(c for c in unicodedata.normalize("NFD", s) if unicodedata.category(c) != "Mn" and c in ALL)


lines = {}
for fn in glob("data/names/*.txt"):
    lines[fn.split("/")[-1][:-4]] = [to_ascii(l) for l in open(fn, encoding="utf-8").read().strip().split("\n")]
categories = sorted(lines)
held_out = {}
for c in categories:
    random.Random(0).shuffle(lines[c])
    cut = max(1, len(lines[c]) // 10)
    held_out[c], lines[c] = lines[c][:cut], lines[c][cut:]


def line_tensor(line):
    t = torch.zeros(len(line), 1, N_LETTERS)
    for i, ch in enumerate(line):
        t[i, 0, ALL.index(ch)] = 1
    return t


class RNN(nn.Module):
    def __init__(self, n_in, n_hidden, n_out):
        super().__init__()
        self.n_hidden = n_hidden
        self.i2h = nn.Linear(n_in + n_hidden, n_hidden)
        self.h2o = nn.Linear(n_hidden, n_out)
        self.softmax = nn.LogSoftmax(dim=1)

    def forward(self, x, h):
        h = torch.tanh(self.i2h(torch.cat((x, h), 1)))
        return self.softmax(self.h2o(h)), h

    def read(self, line):
        h = torch.zeros(1, self.n_hidden)
        for ch in line:
            out, h = self(ch, h)
        return out


rnn = RNN(N_LETTERS, 128, len(categories))
criterion = nn.NLLLoss()


def train(category, line):
    rnn.zero_grad()
    output = rnn.read(line)
    loss = criterion(output, category)
    loss.backward()
    for p in rnn.parameters():
        p.data.add_(p.grad.data, alpha=-lr)
    return output, loss.item()


def held_out_accuracy():
    ok = n = 0
    rnn.eval()
    with torch.no_grad():
        for k, c in enumerate(categories):
            for name in held_out[c]:
                ok += int(rnn.read(line_tensor(name)).argmax(1).item() == k)
                n += 1
    rnn.train()
    return ok / n


current, all_losses = 0.0, []
t0 = time.time()
for it in range(1, n_iters + 1):
    k = random.randrange(len(categories))
    name = random.choice(lines[categories[k]])
    output, loss = train(torch.tensor([k]), line_tensor(name))
    current += loss
    if it % print_every == 0:
        guess = categories[output.topk(1)[1].item()]
        all_losses.append(current / print_every)
        print(f"{it} {time.time() - t0:.0f}s {all_losses[-1]:.4f} {name} -> {guess} held-out {held_out_accuracy():.3f}")
        current = 0.0
torch.save(rnn.state_dict(), "surname-rnn.pt")
