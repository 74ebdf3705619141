import argparse
import dataclasses

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from corpus import Vocab, load_news, pad_collate


@dataclasses.dataclass
class HParams:
    embed: int = 128
    filters: int = 100
    widths: tuple = (3, 4, 5)
    dropout: float = 0.5
    lr: float = 1e-3
    epochs: int = 12
    patience: int = 3


class TextCNN(nn.Module):
    def __init__(self, vocab, classes, hp):
        super().__init__()
        self.emb = nn.Embedding(vocab, hp.embed, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(hp.embed, hp.filters, w) for w in hp.widths)
        self.drop = nn.Dropout(hp.dropout)
        self.fc = nn.Linear(hp.filters * len(hp.widths), classes)

    def features(self, x):
        e = self.emb(x).transpose(1, 2)
        return torch.cat([F.relu(c(e)).amax(-1) for c in self.convs], 1)

    def forward(self, x):
        return self.fc(self.drop(self.features(x)))

    def predict_proba(self, x):
        return F.softmax(self(x), dim=-1)


class Fit:
    def __init__(self, model, hp, device):
        self.model, self.hp, self.device = model.to(device), hp, device
        self.opt = torch.optim.Adam(model.parameters(), lr=hp.lr)
        self.sched = torch.optim.lr_scheduler.ReduceLROnPlateau(self.opt, mode="max", patience=1)

    def batch_loss(self, x, y):
        probs = self.model.predict_proba(x.to(self.device))
        return F.cross_entropy(probs, y.to(self.device))

    def epoch(self, dl):
        self.model.train()
        run = 0.0
        for x, y in dl:
            self.opt.zero_grad()
            loss = self.batch_loss(x, y)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 3.0)
            self.opt.step()
            run += loss.item()
        return run / len(dl)

    def accuracy(self, dl):
        self.model.eval()
        hit = n = 0
        with torch.no_grad():
            for x, y in dl:
                hit += (self.model.predict_proba(x.to(self.device)).argmax(-1).cpu() == y).sum().item()
                n += len(y)
        return hit / n

    def run(self, train_dl, val_dl):
        best, left = 0.0, self.hp.patience
        for e in range(self.hp.epochs):
            loss, acc = self.epoch(train_dl), self.accuracy(val_dl)
            self.sched.step(acc)
            print(f"epoch {e} loss {loss:.4f} val acc {acc:.4f}")
            if acc > best:
                best, left = acc, self.hp.patience
                torch.save(self.model.state_dict(), "textcnn.pt")
            else:
                left -= 1
                if not left:
                    break


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="data/comments")
    args = ap.parse_args()
    train, val, classes = load_news(args.data)
    vocab = Vocab.build(train)
    coll = pad_collate(vocab, min_len=5)
    hp = HParams()
    Fit(TextCNN(len(vocab), classes, hp), hp, "cuda" if torch.cuda.is_available() else "cpu").run(
        DataLoader(train, 64, shuffle=True, collate_fn=coll), DataLoader(val, 256, collate_fn=coll))
