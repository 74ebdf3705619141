import argparse
import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from baskets import BasketSequences, pad_sequences


class GRU4Rec(nn.Module):
    def __init__(self, n_items, d=128, p=0.25):
        super().__init__()
        self.items = nn.Embedding(n_items, d, padding_idx=0)
        self.drop = nn.Dropout(p)
        self.gru = nn.GRU(d, d, batch_first=True)
        self.out = nn.Linear(d, n_items)

    def forward(self, seq):
        h, _ = self.gru(self.drop(self.items(seq)))
        return self.out(h)


def next_item_loss(scores, target):
    probs = scores.softmax(dim=-1)
    return F.cross_entropy(probs.flatten(0, 1), target.flatten(), ignore_index=0)


def hit_and_mrr(accelerator, model, loader, k=20):
    model.eval()
    ranks = []
    for seq, target in loader:
        with torch.no_grad():
            last = model(seq)[:, -1]
        gold = target[:, -1]
        r = (last > last.gather(1, gold[:, None])).sum(1) + 1
        ranks.append(accelerator.gather_for_metrics(r))
    r = torch.cat(ranks).float()
    return (r <= k).float().mean().item(), torch.where(r <= k, 1 / r, torch.zeros_like(r)).mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="diginetica")
    ap.add_argument("--epochs", type=int, default=20)
    ap.add_argument("--batch_size", type=int, default=512)
    ap.add_argument("--lr", type=float, default=1e-3)
    args = ap.parse_args()
    set_seed(2024)
    accelerator = Accelerator()
    train = BasketSequences(args.data, "train")
    train_dl = DataLoader(train, args.batch_size, shuffle=True, collate_fn=pad_sequences)
    valid_dl = DataLoader(BasketSequences(args.data, "valid"), args.batch_size, collate_fn=pad_sequences)
    model = GRU4Rec(train.n_items)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    model, opt, train_dl, valid_dl = accelerator.prepare(model, opt, train_dl, valid_dl)
    best = -math.inf
    for epoch in range(args.epochs):
        model.train()
        total = torch.zeros((), device=accelerator.device)
        for seq, target in train_dl:
            opt.zero_grad()
            loss = next_item_loss(model(seq), target)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            total += loss.detach()
        hr, mrr = hit_and_mrr(accelerator, model, valid_dl)
        accelerator.print(f"epoch {epoch} loss {total.item() / len(train_dl):.4f} HR@20 {hr:.4f} MRR@20 {mrr:.4f}")
        if mrr > best:
            best = mrr
            accelerator.save(accelerator.unwrap_model(model).state_dict(), "gru4rec.pt")


if __name__ == "__main__":
    main()
