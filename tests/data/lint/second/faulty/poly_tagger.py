from dataclasses import dataclass, field

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from ud import Treebank, collate_sentences


@dataclass
class Opts:
    train: str = "en_ewt-ud-train.conllu"
    dev: str = "en_ewt-ud-dev.conllu"
    lr: float = 1e-3
    epochs: int = 20
    langs: list = field(default_factory=lambda: ["en"])


class CharWordTagger(nn.Module):
    def __init__(self, n_chars, n_words, n_tags, d=100):
        super().__init__()
        self.chars = nn.Embedding(n_chars, 32, padding_idx=0)
        self.cconv = nn.Conv1d(32, 64, 3, padding=1)
        self.words = nn.Embedding(n_words, d, padding_idx=0)
        self.rnn = nn.LSTM(d + 64, 200, 2, bidirectional=True, batch_first=True, dropout=0.3)
        self.out = nn.Linear(400, n_tags)

    def forward(self, words, chars):
        b, t, c = chars.shape
        k = self.cconv(self.chars(chars.view(b * t, c)).transpose(1, 2)).amax(-1).view(b, t, -1)
        h, _ = self.rnn(torch.cat([self.words(words), F.relu(k)], -1))
        return self.out(h)


class TaggerTrainer:
    def __init__(self, opts):
        self.opts = opts
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        train, dev = Treebank(opts.train), Treebank(opts.dev)
        dev.share_vocab(train)
        self.train_dl = DataLoader(train, 32, shuffle=True, collate_fn=collate_sentences)
        self.dev_dl = DataLoader(dev, 64, collate_fn=collate_sentences)
        self.net = CharWordTagger(train.n_chars, train.n_words, train.n_tags).to(self.device)
        self.opt = torch.optim.Adam(self.net.parameters(), lr=opts.lr)
        self.sched = torch.optim.lr_scheduler.ExponentialLR(self.opt, 0.95)

    def _loss(self, batch):
        w, c, t = (x.to(self.device) for x in batch)
        logits = self.net(w, c)
        return F.cross_entropy(logits.flatten(0, 1), t.flatten(), ignore_index=-1), logits, t

    def train_batch(self, batch):
        loss, _, _ = self._loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 5.0)
        self.opt.step()
        return loss.item()

    def dev_accuracy(self):
        self.net.eval()
        ok = n = 0
        with torch.no_grad():
            for batch in self.dev_dl:
                _, logits, t = self._loss(batch)
                m = t >= 0
                ok += (logits.argmax(-1)[m] == t[m]).sum().item()
                n += m.sum().item()
        self.net.train()
        return ok / n

    def fit(self):
        self.net.train()
        best = 0.0
        for epoch in range(self.opts.epochs):
            losses = [self.train_batch(b) for b in self.train_dl]
            self.sched.step()
            acc = self.dev_accuracy()
            print(f"epoch {epoch} loss {sum(losses) / len(losses):.4f} dev {acc:.4f}")
            if acc > best:
                best = acc
                torch.save(self.net.state_dict(), "tagger.pt")


if __name__ == "__main__":
    torch.manual_seed(6)
    TaggerTrainer(Opts()).fit()
