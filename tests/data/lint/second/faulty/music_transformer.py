import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

from maestro import EventSequences


class MusicTransformer(nn.Module):
    def __init__(self, vocab=388, d=512, depth=6, heads=8, ctx=1024):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(ctx, d)
        enc = nn.TransformerEncoderLayer(d, heads, 4 * d, 0.1, activation="gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(enc, depth)
        self.ln = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab)

    def forward(self, x):
        t = x.size(1)
        mask = torch.triu(torch.full((t, t), float("-inf"), device=x.device), 1)
        h = self.tok(x) + self.pos(torch.arange(t, device=x.device))
        return self.head(self.ln(self.blocks(h, mask)))


class History:
    def __init__(self, writer):
        self.writer = writer
        self.values = []

    def push(self, loss):
        self.values.append(loss)

    def flush(self, tag, step):
        mean = torch.stack(self.values).mean().item()
        self.writer.add_scalar(tag, mean, step)
        self.values.clear()
        return mean


def nll(model, events):
    logits = model(events[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), events[:, 1:], ignore_index=0)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--lr", type=float, default=2e-4)
    ap.add_argument("--epochs", type=int, default=100)
    ap.add_argument("--batch", type=int, default=8)
    args = ap.parse_args()
    torch.manual_seed(13)
    device = "cuda"
    train = DataLoader(EventSequences("train"), args.batch, shuffle=True, num_workers=4)
    valid = DataLoader(EventSequences("validation"), args.batch)
    model = MusicTransformer().to(device)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.9, 0.98))
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs)
    history = History(SummaryWriter("runs/music"))
    for epoch in range(args.epochs):
        model.train()
        for events in train:
            loss = nll(model, events.to(device))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            history.push(loss)
        train_loss = history.flush("train/nll", epoch)
        sched.step()
        model.eval()
        with torch.no_grad():
            for events in valid:
                history.push(nll(model, events.to(device)))
        print(f"epoch {epoch} train {train_loss:.4f} valid {history.flush('valid/nll', epoch):.4f}")
        torch.save(model.state_dict(), "music.pt")


if __name__ == "__main__":
    main()
