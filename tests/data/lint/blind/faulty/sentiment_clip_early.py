import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from reviews import Reviews, collate


class TextCNN(nn.Module):
    def __init__(self, vocab, dim=128, widths=(3, 4, 5)):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.convs = nn.ModuleList(nn.Conv1d(dim, 100, w) for w in widths)
        self.fc = nn.Linear(100 * len(widths), 2)

    def forward(self, ids):
        h = self.emb(ids).transpose(1, 2)
        pooled = [conv(h).relu().max(dim=2).values for conv in self.convs]
        return self.fc(torch.cat(pooled, dim=1))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--clip", type=float, default=3.0)
    ap.add_argument("--lr", type=float, default=1e-3)
    args = ap.parse_args()
    train_set, test_set = Reviews("train"), Reviews("test")
    train_dl = DataLoader(train_set, 50, shuffle=True, collate_fn=collate)
    test_dl = DataLoader(test_set, 200, collate_fn=collate)
    model = TextCNN(len(train_set.vocab))
    loss_fn = nn.CrossEntropyLoss()
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(8):
        model.train()
        for ids, label in train_dl:
            opt.zero_grad()
            loss = loss_fn(model(ids), label)
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            loss.backward()
            opt.step()
        model.eval()
        with torch.no_grad():
            ok = sum((model(ids).argmax(1) == label).sum().item() for ids, label in test_dl)
        print(epoch, ok / len(test_set))


if __name__ == "__main__":
    main()
