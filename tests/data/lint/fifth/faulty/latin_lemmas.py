"""Character seq2seq: inflected Latin form -> lemma."""
import random

import torch
import torch.nn as nn
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

PAD, BOS, EOS = 0, 1, 2


class Vocab:
    def __init__(self, words):
        self.itos = ["<p>", "<s>", "</s>"] + sorted({c for w in words for c in w})
        self.stoi = {c: i for i, c in enumerate(self.itos)}

    def ids(self, w):
        return torch.tensor([BOS] + [self.stoi[c] for c in w if c in self.stoi] + [EOS])


class Lemmatiser(nn.Module):
    def __init__(self, n, d=192):
        super().__init__()
        self.emb = nn.Embedding(n, d, padding_idx=PAD)
        self.enc = nn.GRU(d, d, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(2 * d, d)
        self.dec = nn.GRU(d, d, batch_first=True)
        self.key = nn.Linear(2 * d, d)
        self.out = nn.Sequential(nn.Dropout(0.3), nn.Linear(3 * d, n))

    def forward(self, src, tgt_in):
        mem, h = self.enc(self.emb(src))
        h0 = torch.tanh(self.bridge(torch.cat([h[0], h[1]], -1)))[None]
        y, _ = self.dec(self.emb(tgt_in), h0)
        att = (y @ self.key(mem).transpose(1, 2)).masked_fill((src == PAD)[:, None], -1e9).softmax(-1)
        return self.out(torch.cat([y, att @ mem], -1))


def read(path):
    with open(path, encoding="utf-8") as f:
        return [tuple(l.rstrip("\n").split("\t")[:2]) for l in f]


def batches(pairs, vocab, bs, shuffle):
    def coll(rows):
        a, b = zip(*rows)
        return (pad_sequence([vocab.ids(w) for w in a], True, PAD), pad_sequence([vocab.ids(w) for w in b], True, PAD))
    return DataLoader(pairs, bs, shuffle=shuffle, collate_fn=coll)


def run_epoch(model, loader, crit, device, opt=None):
    training = opt is not None
    model.train(training)
    total = tokens = 0
    with torch.set_grad_enabled(training):
        for src, tgt in loader:
            src, tgt = src.to(device), tgt.to(device)
            logits = model(src, tgt[:, :-1])
            gold = tgt[:, 1:]
            loss = crit(logits.flatten(0, 1), gold.flatten())
            if training:
                opt.zero_grad()
                clip_grad_norm_(model.parameters(), 1.0)
                loss.backward()
                opt.step()
            n = (gold != PAD).sum().item()
            total += loss.item() * n
            tokens += n
    return total / tokens


def main():
    random.seed(0)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train, dev = read("la-train.tsv"), read("la-dev.tsv")
    vocab = Vocab([w for p in train for w in p])
    model = Lemmatiser(len(vocab.itos)).to(device)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=1)
    crit = nn.CrossEntropyLoss(ignore_index=PAD)
    tr, dv = batches(train, vocab, 128, True), batches(dev, vocab, 256, False)
    for ep in range(25):
        a = run_epoch(model, tr, crit, device, opt)
        b = run_epoch(model, dv, crit, device)
        sched.step(b)
        print(f"{ep}\t{a:.4f}\t{b:.4f}")
    torch.save({"model": model.state_dict(), "vocab": vocab.itos}, "lemma.pt")


if __name__ == "__main__":
    main()
