"""Masked residue modelling on UniRef chunks."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from uniref import ResidueChunks

PAD, MASK, V = 0, 1, 27


class ResidueEncoder(nn.Module):
    def __init__(self, d=512, h=8, depth=10, ctx=512):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, d, padding_idx=PAD), nn.Embedding(ctx, d)
        layer = nn.TransformerEncoderLayer(d, h, 4 * d, 0.1, "gelu", batch_first=True)
        self.enc = nn.TransformerEncoder(layer, depth)
        self.out = nn.Linear(d, V)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.size(1), device=ids.device))
        return self.out(self.enc(x, src_key_padding_mask=ids == PAD))


def corrupt(ids, rate=0.15):
    pick = (torch.rand(ids.shape, device=ids.device) < rate) & (ids != PAD)
    labels = ids.masked_fill(~pick, -100)
    u = torch.rand(ids.shape, device=ids.device)
    noisy = torch.where(pick & (u < 0.8), torch.full_like(ids, MASK), ids)
    rnd = torch.randint(2, V, ids.shape, device=ids.device)
    return torch.where(pick & (u >= 0.9), rnd, noisy), labels


def mlm(model, ids):
    x, y = corrupt(ids)
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)


@torch.no_grad()
def valid_loss(model, dl, dev, limit=200):
    model.eval()
    vals = []
    for i, ids in enumerate(dl):
        if i == limit:
            break
        vals.append(mlm(model, ids.to(dev)).item())
    model.train()
    return sum(vals) / len(vals)


def schedule(opt, warm, total):
    def f(s):
        return (s + 1) / warm if s < warm else max(0.0, (total - s) / (total - warm))
    return torch.optim.lr_scheduler.LambdaLR(opt, f)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", required=True)
    ap.add_argument("--bs", type=int, default=64)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--warmup-steps", type=int, default=10)
    ap.add_argument("--steps", type=int, default=200_000)
    ap.add_argument("--clip", type=float, default=1.0)
    a = ap.parse_args()
    torch.manual_seed(0)
    dev = torch.device("cuda")
    model = ResidueEncoder().to(dev)
    opt = torch.optim.Adam(model.parameters(), lr=a.lr, betas=(0.9, 0.999))
    sched = schedule(opt, a.warmup_steps, a.steps)
    tr = DataLoader(ResidueChunks(a.data, "train"), a.bs, shuffle=True, num_workers=8, drop_last=True)
    va = DataLoader(ResidueChunks(a.data, "valid"), a.bs)
    step = 0
    model.train()
    while step < a.steps:
        for ids in tr:
            loss = mlm(model, ids.to(dev))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), a.clip)
            opt.step()
            sched.step()
            step += 1
            if step % 100 == 0:
                print(f"{step} {loss.item():.4f} lr {sched.get_last_lr()[0]:.2e}")
            if step % 5000 == 0:
                print(f"{step} valid {valid_loss(model, va, dev):.4f}")
                torch.save(model.state_dict(), "residue.pt")
            if step >= a.steps:
                break


if __name__ == "__main__":
    main()
