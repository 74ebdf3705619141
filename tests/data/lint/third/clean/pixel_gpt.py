"""Autoregressive transformer over quantised 16x16 images (bf16, accumulation, cosine LR)."""
import math
import os
import time
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

out_dir, eval_every, eval_iters, log_every = "out", 500, 50, 20
batch_size, block, grad_accum = 16, 256, 4
n_layer, n_head, n_embd, vocab = 6, 6, 384, 512
learning_rate, min_lr, warmup_iters, max_iters = 6e-4, 6e-5, 2000, 60000
weight_decay, beta1, beta2, grad_clip = 0.1, 0.9, 0.95, 1.0
device = "cuda"
dtype = "bfloat16"
for k, v in (a.split("=") for a in os.environ.get("GPT_ARGS", "").split()):
    globals()[k] = type(globals()[k])(v)

torch.manual_seed(1337)
ctx = nullcontext() if device == "cpu" else torch.amp.autocast(device_type=device, dtype=torch.bfloat16)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.qkv, self.o = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, n_head, -1).transpose(1, 2) for t in self.qkv(self.ln1(x)).split(C, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, n_embd), nn.Embedding(block, n_embd)
        self.h = nn.Sequential(*[Block() for _ in range(n_layer)])
        self.ln_f, self.head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab, bias=False)

    def forward(self, idx, tgt):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        logits = self.head(self.ln_f(self.h(x)))
        return logits, F.cross_entropy(logits.view(-1, vocab), tgt.view(-1))


def get_batch(split):
    d = np.memmap(f"pixels_{split}.bin", dtype=np.uint16, mode="r")
    ix = torch.randint(len(d) - block - 1, (batch_size,))
    x = torch.stack([torch.from_numpy(d[i:i + block].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(d[i + 1:i + 1 + block].astype(np.int64)) for i in ix])
    return x.to(device), y.to(device)


@torch.no_grad()
def estimate_loss(model):
    out = {}
    model.eval()
    for split in ("train", "val"):
        ls = torch.zeros(eval_iters)
        for k in range(eval_iters):
            with ctx:
                _, loss = model(*get_batch(split))
            ls[k] = loss.item()
        out[split] = ls.mean().item()
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    r = min(1.0, (it - warmup_iters) / (max_iters - warmup_iters))
    return min_lr + 0.5 * (1 + math.cos(math.pi * r)) * (learning_rate - min_lr)


model = GPT().to(device)
norm_emb = {id(p) for m in model.modules() if isinstance(m, (nn.LayerNorm, nn.Embedding)) for p in m.parameters()}
mats = [p for p in model.parameters() if p.dim() >= 2 and id(p) not in norm_emb]
rest = [p for p in model.parameters() if p.dim() < 2 or id(p) in norm_emb]
optimizer = torch.optim.AdamW([{"params": mats, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}],
                              lr=learning_rate, betas=(beta1, beta2))
best, t0 = 1e9, time.time()
X, Y = get_batch("train")
for it in range(max_iters):
    for g in optimizer.param_groups:
        g["lr"] = get_lr(it)
    if it % eval_every == 0:
        l = estimate_loss(model)
        print(f"step {it}: train {l['train']:.4f} val {l['val']:.4f}")
        if l["val"] < best:
            best = l["val"]
            torch.save(model.state_dict(), os.path.join(out_dir, "ckpt.pt"))
    for micro in range(grad_accum):
        with ctx:
            _, loss = model(X, Y)
            loss = loss / grad_accum
        X, Y = get_batch("train")
        loss.backward()
    if grad_clip != 0.0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if it % log_every == 0:
        print(f"iter {it}: loss {loss.item() * grad_accum:.4f}, {(time.time() - t0) * 1e3:.0f}ms")
        t0 = time.time()
