import math
import os
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

cfg = dict(vocab=50257, ctx=256, layers=6, heads=6, dim=384, drop=0.0,
           batch=64, max_steps=20000, eval_every=500,
           lr=1.5e-3, min_lr=1e-4, warmup=10, betas=(0.9, 0.999), wd=0.1)


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.h, C // self.h).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        x = x + self.proj(y)
        return x + self.mlp(self.ln2(x))


class TinyGPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok, self.pos = nn.Embedding(c["vocab"], c["dim"]), nn.Embedding(c["ctx"], c["dim"])
        self.blocks = nn.Sequential(*[Block(c["dim"], c["heads"]) for _ in range(c["layers"])])
        self.ln = nn.LayerNorm(c["dim"])
        self.head = nn.Linear(c["dim"], c["vocab"], bias=False)

    def forward(self, x, y):
        h = self.tok(x) + self.pos(torch.arange(x.size(1), device=x.device))
        logits = self.head(self.ln(self.blocks(h)))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))


def batches(split):
    data = np.memmap(os.path.join("data", split + ".bin"), dtype=np.uint16, mode="r")
    while True:
        ix = np.random.randint(0, len(data) - cfg["ctx"] - 1, cfg["batch"])
        b = torch.from_numpy(np.stack([data[i:i + cfg["ctx"] + 1] for i in ix]).astype(np.int64)).cuda()
        yield b[:, :-1], b[:, 1:].contiguous()


def lr_at(step):
    if step < cfg["warmup"]:
        return cfg["lr"] * (step + 1) / cfg["warmup"]
    t = (step - cfg["warmup"]) / (cfg["max_steps"] - cfg["warmup"])
    return cfg["min_lr"] + 0.5 * (cfg["lr"] - cfg["min_lr"]) * (1 + math.cos(math.pi * t))


@torch.no_grad()
def val_loss(model, it, n=50):
    model.eval()
    out = sum(model(*next(it)).item() for _ in range(n)) / n
    model.train()
    return out


def main():
    torch.manual_seed(1)
    np.random.seed(1)
    model = TinyGPT(cfg).cuda()
    linear = {id(p) for m in model.modules() if isinstance(m, nn.Linear) for n, p in m.named_parameters() if n == "weight"}
    opt = torch.optim.AdamW([
        {"params": [p for p in model.parameters() if id(p) in linear], "weight_decay": cfg["wd"]},
        {"params": [p for p in model.parameters() if id(p) not in linear], "weight_decay": 0.0},
    ], lr=cfg["lr"], betas=cfg["betas"])
    train_it, val_it = batches("train"), batches("val")
    model.train()
    t0 = time.time()
    for step in range(cfg["max_steps"]):
        for g in opt.param_groups:
            g["lr"] = lr_at(step)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(*next(train_it))
        opt.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % 20 == 0:
            print(f"{step} loss {loss.item():.3f} norm {norm.item():.2f} {time.time() - t0:.0f}s")
        if step and step % cfg["eval_every"] == 0:
            print(f"{step} val {val_loss(model, val_it):.4f}")
            torch.save(model.state_dict(), "tinygpt.pt")


if __name__ == "__main__":
    main()
