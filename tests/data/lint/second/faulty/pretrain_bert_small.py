import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler
from transformers import BertConfig, BertForMaskedLM

from mlm_data import MaskedShards


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--warmup_steps", type=int, default=10)
    p.add_argument("--max_steps", type=int, default=100000)
    p.add_argument("--batch", type=int, default=64)
    return p.parse_args()


def decay_groups(model, wd):
    yes, no = [], []
    for name, p in model.named_parameters():
        (no if p.ndim < 2 or "embeddings" in name else yes).append(p)
    return [{"params": yes, "weight_decay": wd}, {"params": no, "weight_decay": 0.0}]


def evaluate(model, loader, device):
    model.eval()
    stat = torch.zeros(2, device=device)
    with torch.no_grad():
        for b in loader:
            stat[0] += model(**{k: v.to(device) for k, v in b.items()}).loss
            stat[1] += 1
    dist.all_reduce(stat)
    model.train()
    return (stat[0] / stat[1]).item()


def main():
    args = parse()
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    torch.manual_seed(100 + rank)
    cfg = BertConfig(hidden_size=512, num_hidden_layers=8, num_attention_heads=8, intermediate_size=2048)
    model = DDP(BertForMaskedLM(cfg).to(device), device_ids=[rank])
    optimizer = torch.optim.AdamW(decay_groups(model, 0.01), lr=args.lr, betas=(0.9, 0.999))

    def schedule(step):
        if step < args.warmup_steps:
            return (step + 1) / args.warmup_steps
        return max(0.0, (args.max_steps - step) / (args.max_steps - args.warmup_steps))

    scheduler = LambdaLR(optimizer, schedule)
    train_set = MaskedShards("train")
    sampler = DistributedSampler(train_set, drop_last=True)
    train_dl = DataLoader(train_set, args.batch, sampler=sampler, num_workers=4)
    dev_set = MaskedShards("dev")
    dev_dl = DataLoader(dev_set, args.batch, sampler=DistributedSampler(dev_set, shuffle=False))
    step, epoch = 0, 0
    model.train()
    while step < args.max_steps:
        sampler.set_epoch(epoch)
        for b in train_dl:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(**{k: v.to(device) for k, v in b.items()}).loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            step += 1
            if step % 2000 == 0:
                val = evaluate(model, dev_dl, device)
                if rank == 0:
                    print(f"step {step} train {loss.item():.3f} dev {val:.4f}")
                    torch.save(model.module.state_dict(), "bert_small.pt")
            if step >= args.max_steps:
                break
        epoch += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
