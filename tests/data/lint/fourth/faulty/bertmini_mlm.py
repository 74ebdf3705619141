import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast, DataCollatorForLanguageModeling, get_cosine_schedule_with_warmup

from shards import TokenShards


def build_optimizer(model, args):
    matrices, norms, tables, biases, seen = [], [], [], [], set()
    for mod in model.modules():
        for name, p in mod.named_parameters(recurse=False):
            if id(p) in seen:
                continue
            seen.add(id(p))
            if name == "bias" and not isinstance(mod, nn.LayerNorm):
                biases.append(p)
            elif isinstance(mod, nn.LayerNorm):
                norms.append(p)
            elif isinstance(mod, nn.Embedding):
                tables.append(p)
            else:
                matrices.append(p)
    return torch.optim.AdamW([
        {"params": matrices, "weight_decay": args.wd},
        {"params": norms, "weight_decay": args.wd},
        {"params": tables, "weight_decay": 0.0},
        {"params": biases, "weight_decay": 0.0},
    ], lr=args.lr, betas=(0.9, 0.98), eps=1e-6)


@torch.no_grad()
def validate(model, loader, device):
    model.eval()
    acc = torch.zeros(2, device=device)
    for batch in loader:
        batch = {k: v.to(device) for k, v in batch.items()}
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**batch).loss
        acc += torch.stack([loss.float(), torch.ones_like(loss, dtype=torch.float)])
    dist.all_reduce(acc)
    model.train()
    return (acc[0] / acc[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--lr", type=float, default=5e-4)
    ap.add_argument("--wd", type=float, default=0.01)
    ap.add_argument("--steps", type=int, default=100_000)
    ap.add_argument("--warmup", type=int, default=5000)
    ap.add_argument("--bs", type=int, default=64)
    args = ap.parse_args()
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    torch.manual_seed(0)

    tok = BertTokenizerFast.from_pretrained("bert-base-uncased")
    coll = DataCollatorForLanguageModeling(tok, mlm_probability=0.15)
    train, val = TokenShards("wiki/train"), TokenShards("wiki/val")
    sampler = DistributedSampler(train)
    train_dl = DataLoader(train, args.bs, sampler=sampler, collate_fn=coll, num_workers=4, drop_last=True)
    val_dl = DataLoader(val, args.bs, sampler=DistributedSampler(val, shuffle=False), collate_fn=coll)

    raw = BertForMaskedLM(BertConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, tie_word_embeddings=False)).to(device)
    opt = build_optimizer(raw, args)
    sched = get_cosine_schedule_with_warmup(opt, args.warmup, args.steps)
    model = DistributedDataParallel(raw, device_ids=[local])
    model.train()
    step, epoch = 0, 0
    while step < args.steps:
        sampler.set_epoch(epoch)
        for batch in train_dl:
            batch = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(**batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            opt.zero_grad(set_to_none=True)
            step += 1
            if step % 1000 == 0:
                v = validate(model, val_dl, device)
                if dist.get_rank() == 0:
                    print(f"{step} train {loss.item():.3f} val {v:.3f}")
                    raw.save_pretrained("bertmini")
            if step >= args.steps:
                break
        epoch += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
