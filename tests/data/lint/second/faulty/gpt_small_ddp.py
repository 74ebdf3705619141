import math
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

BLOCK, BATCH, STEPS, WARM, LR = 512, 16, 60000, 1500, 4e-4


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.h = h

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.h, d // self.h).transpose(1, 2) for z in self.qkv(self.ln_1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab=50304, d=512, h=8, depth=8):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(BLOCK, d)
        self.blocks = nn.ModuleList(Block(d, h) for _ in range(depth))
        self.ln_f = nn.LayerNorm(d)
        self.lm_head = nn.Linear(d, vocab, bias=False)

    def forward(self, x, y):
        h = self.wte(x) + self.wpe(torch.arange(x.size(1), device=x.device))
        for b in self.blocks:
            h = b(h)
        return F.cross_entropy(self.lm_head(self.ln_f(h)).flatten(0, 1), y.flatten())


def build_optimizer(model):
    linear, norm_and_emb = [], []
    for name, p in model.named_parameters():
        if "ln_" in name or "wte" in name or "wpe" in name:
            norm_and_emb.append(p)
        else:
            linear.append(p)
    return torch.optim.AdamW([
        {"params": linear, "weight_decay": 0.1},
        {"params": norm_and_emb, "weight_decay": 0.1},
    ], lr=LR, betas=(0.9, 0.95), fused=True)


def lr_at(step):
    if step < WARM:
        return LR * (step + 1) / WARM
    return 0.1 * LR + 0.45 * LR * (1 + math.cos(math.pi * (step - WARM) / (STEPS - WARM)))


def batches(path, device, seed):
    data = np.memmap(path, dtype=np.uint16, mode="r")
    rng = np.random.default_rng(seed)
    while True:
        ix = rng.integers(0, len(data) - BLOCK - 1, BATCH)
        chunk = torch.from_numpy(np.stack([data[i:i + BLOCK + 1] for i in ix]).astype(np.int64)).to(device)
        yield chunk[:, :-1].contiguous(), chunk[:, 1:].contiguous()


def main():
    dist.init_process_group("nccl")
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    torch.manual_seed(0)
    raw = GPT().to(device)
    optimizer = build_optimizer(raw)
    model = DDP(raw, device_ids=[local])
    train, val = batches("train.bin", device, rank), batches("val.bin", device, 1000 + rank)
    for step in range(STEPS):
        for g in optimizer.param_groups:
            g["lr"] = lr_at(step)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(*next(train))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 500 == 0:
            model.eval()
            with torch.no_grad():
                v = torch.stack([model(*next(val)) for _ in range(20)]).mean()
            dist.all_reduce(v, op=dist.ReduceOp.AVG)
            model.train()
            if rank == 0:
                print(f"{step} train {loss.item():.3f} val {v.item():.3f}")
    if rank == 0:
        torch.save(raw.state_dict(), "gpt_small.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
