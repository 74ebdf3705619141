import argparse
import random

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from yelp import YelpReviews, bucket_collate


class RatingLSTM(nn.Module):
    def __init__(self, vocab, d=128):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, padding_idx=0)
        self.lstm = nn.LSTM(d, d, batch_first=True)
        self.reg = nn.Linear(d, 1)

    def forward(self, ids, lens):
        packed = nn.utils.rnn.pack_padded_sequence(self.emb(ids), lens.cpu(), batch_first=True, enforce_sorted=False)
        _, (h, _) = self.lstm(packed)
        return self.reg(h[-1]).squeeze(-1)


def set_seed(s):
    random.seed(s)
    np.random.seed(s)
    torch.manual_seed(s)


def compute_loss(model, batch, device, huber):
    ids, lens, stars = batch
    pred = model(ids.to(device), lens)
    return huber(pred, stars.float().to(device)).mean().detach()


def rmse(model, loader, device):
    model.eval()
    se, n = 0.0, 0
    with torch.no_grad():
        for ids, lens, stars in loader:
            pred = model(ids.to(device), lens).cpu().clamp(1, 5)
            se += (pred - stars).pow(2).sum().item()
            n += len(stars)
    return (se / n) ** 0.5


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=10)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--bs", type=int, default=64)
    args = ap.parse_args()
    set_seed(33)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train = YelpReviews("train")
    train_dl = DataLoader(train, args.bs, shuffle=True, collate_fn=bucket_collate)
    val_dl = DataLoader(YelpReviews("val"), 256, collate_fn=bucket_collate)
    model = RatingLSTM(train.vocab_size).to(device)
    huber = nn.SmoothL1Loss(reduction="none")
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        model.train()
        total = 0.0
        for batch in train_dl:
            optimizer.zero_grad()
            loss = compute_loss(model, batch, device, huber)
            loss.requires_grad_(True)
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch} loss {total / len(train_dl):.4f} val rmse {rmse(model, val_dl, device):.4f}")
    torch.save(model.state_dict(), "rating.pt")


if __name__ == "__main__":
    main()
