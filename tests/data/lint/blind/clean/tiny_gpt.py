"""Small character-level GPT with a hand-written cosine schedule."""
import math
import os

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

block, batch, n_embd, n_head, n_layer, vocab = 128, 32, 192, 6, 4, 96
max_iters, warmup_iters, max_lr, min_lr = 6000, 200, 6e-4, 6e-5
micro_steps, eval_every, grad_clip = 4, 250, 1.0
device = "cuda" if torch.cuda.is_available() else "cpu"
data_dir = os.environ.get("DATA", "data")
splits = {s: np.memmap(os.path.join(data_dir, f"{s}.bin"), dtype=np.uint16, mode="r") for s in ("train", "val")}


def get_batch(split):
    arr = splits[split]
    ix = torch.randint(len(arr) - block - 1, (batch,))
    x = torch.stack([torch.from_numpy(arr[i:i + block].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(arr[i + 1:i + 1 + block].astype(np.int64)) for i in ix])
    return x.to(device), y.to(device)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(vocab, n_embd)
        self.pos = nn.Embedding(block, n_embd)
        layer = nn.TransformerEncoderLayer(n_embd, n_head, 4 * n_embd, dropout=0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, n_layer)
        self.head = nn.Linear(n_embd, vocab, bias=False)

    def forward(self, idx, targets=None):
        t = idx.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(t, device=idx.device)
        h = self.tok(idx) + self.pos(torch.arange(t, device=idx.device))
        logits = self.head(self.body(h, mask=mask, is_causal=True))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, vocab), targets.view(-1))
        return logits, loss


def lr_at(it):
    if it < warmup_iters:
        return max_lr * (it + 1) / warmup_iters
    frac = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (max_lr - min_lr) * (1 + math.cos(math.pi * frac))


@torch.no_grad()
def estimate_loss(n=50):
    model.eval()
    out = {}
    for split in ("train", "val"):
        out[split] = sum(model(*get_batch(split))[1].item() for _ in range(n)) / n
    model.train()
    return out


model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=max_lr, betas=(0.9, 0.95), weight_decay=0.1)
for it in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = lr_at(it)
    if it % eval_every == 0:
        print(it, estimate_loss())
    for _ in range(micro_steps):
        xb, yb = get_batch("train")
        with torch.autocast(device_type=device, dtype=torch.bfloat16):
            _, loss = model(xb, yb)
            loss = loss / micro_steps
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
