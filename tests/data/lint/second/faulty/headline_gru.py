# Headline generator, step-based training with periodic validation.
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from headlines import HeadlineDataset, pad_headlines

MAX_STEPS = 30000
EVAL_EVERY = 1000


class HeadlineGRU(nn.Module):
    def __init__(self, vocab, d=300):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, padding_idx=0)
        self.drop = nn.Dropout(0.35)
        self.gru = nn.GRU(d, d, 2, batch_first=True, dropout=0.35)
        self.out = nn.Linear(d, vocab)

    def forward(self, x):
        h, _ = self.gru(self.drop(self.emb(x)))
        return self.out(self.drop(h))


def lm_loss(model, ids):
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)


def forever(loader):
    while True:
        yield from loader


def validation_ppl(model, loader, device):
    model.eval()
    total = 0.0
    with torch.no_grad():
        for ids in loader:
            total += lm_loss(model, ids.to(device)).item()
    return math.exp(total / len(loader))


def main():
    torch.manual_seed(14)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_set = HeadlineDataset("train")
    train_dl = DataLoader(train_set, 128, shuffle=True, collate_fn=pad_headlines, drop_last=True)
    val_dl = DataLoader(HeadlineDataset("val"), 256, collate_fn=pad_headlines)
    model = HeadlineGRU(train_set.vocab_size).to(device)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=MAX_STEPS)
    best = float("inf")
    model.train()
    for step, ids in enumerate(forever(train_dl), start=1):
        loss = lm_loss(model, ids.to(device))
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        if step % 100 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        if step % EVAL_EVERY == 0:
            ppl = validation_ppl(model, val_dl, device)
            print(f"step {step} val ppl {ppl:.2f}")
            if ppl < best:
                best = ppl
                torch.save(model.state_dict(), "headline.pt")
        if step >= MAX_STEPS:
            break


if __name__ == "__main__":
    main()
