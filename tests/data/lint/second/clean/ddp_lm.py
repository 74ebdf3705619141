"""torchrun --nproc_per_node=8 ddp_lm.py --shards /data/shards"""
import argparse
import contextlib
import glob
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel


class TokenShards(Dataset):
    def __init__(self, pattern, seq_len):
        toks = torch.cat([torch.load(f) for f in sorted(glob.glob(pattern))]).long()
        n = (len(toks) - 1) // seq_len
        self.x = toks[:n * seq_len].view(n, seq_len)
        self.y = toks[1:n * seq_len + 1].view(n, seq_len)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


@torch.no_grad()
def evaluate(ddp_model, loader, device):
    ddp_model.eval()
    acc = torch.zeros(2, device=device)
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = ddp_model(x.to(device)).logits
            acc[0] += F.cross_entropy(logits.flatten(0, 1), y.to(device).flatten(), reduction="sum")
        acc[1] += y.numel()
    dist.all_reduce(acc)
    ddp_model.train()
    return (acc[0] / acc[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--shards", required=True)
    ap.add_argument("--accum", type=int, default=8)
    ap.add_argument("--lr", type=float, default=3e-4)
    ap.add_argument("--epochs", type=int, default=2)
    a = ap.parse_args()

    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    torch.manual_seed(1 + dist.get_rank())

    train_set = TokenShards(os.path.join(a.shards, "train_*.pt"), 1024)
    val_set = TokenShards(os.path.join(a.shards, "val_*.pt"), 1024)
    sampler = DistributedSampler(train_set, shuffle=True, drop_last=True)
    train_loader = DataLoader(train_set, 8, sampler=sampler, num_workers=2, pin_memory=True)
    val_loader = DataLoader(val_set, 8, sampler=DistributedSampler(val_set, shuffle=False))

    model = GPT2LMHeadModel(GPT2Config()).to(device)
    model = DDP(model, device_ids=[local])
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr, betas=(0.9, 0.95), weight_decay=0.1)
    steps = a.epochs * (len(train_loader) // a.accum)
    warm = torch.optim.lr_scheduler.LinearLR(opt, 1e-3, 1.0, total_iters=2000)
    cos = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=max(1, steps - 2000))
    sched = torch.optim.lr_scheduler.SequentialLR(opt, [warm, cos], milestones=[2000])

    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        usable = len(train_loader) // a.accum * a.accum
        for i, (x, y) in enumerate(train_loader):
            if i >= usable:
                break
            last = (i + 1) % a.accum == 0
            sync = contextlib.nullcontext() if last else model.no_sync()
            with sync:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    logits = model(x.to(device, non_blocking=True)).logits
                    loss = F.cross_entropy(logits.flatten(0, 1), y.to(device).flatten())
                (loss / a.accum).backward()
            if last:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                sched.step()
                opt.zero_grad(set_to_none=True)
                if dist.get_rank() == 0:
                    print(f"{epoch}/{i} loss {loss.item():.3f}")
        val = evaluate(model, val_loader, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} val {val:.4f}")
            torch.save(model.module.state_dict(), "gpt2_ddp.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
