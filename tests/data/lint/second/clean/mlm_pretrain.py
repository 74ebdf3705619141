import argparse
import random

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast

from lines import LineDataset


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def mask_tokens(ids, tok, p=0.15):
    labels = ids.clone()
    special = torch.isin(ids, torch.tensor(tok.all_special_ids))
    prob = torch.full(ids.shape, p).masked_fill(special, 0.0)
    picked = torch.bernoulli(prob).bool()
    labels[~picked] = -100
    replace = torch.bernoulli(torch.full(ids.shape, 0.8)).bool() & picked
    ids = ids.masked_fill(replace, tok.mask_token_id)
    rand = torch.bernoulli(torch.full(ids.shape, 0.5)).bool() & picked & ~replace
    ids = torch.where(rand, torch.randint_like(ids, len(tok)), ids)
    return ids, labels


def linear_warmup(opt, warmup, total):
    def fn(step):
        if step < warmup:
            return step / max(1, warmup)
        return max(0.0, (total - step) / max(1, total - warmup))
    return LambdaLR(opt, fn)


def evaluate(model, loader, device):
    model.eval()
    tot = cnt = 0
    with torch.no_grad(), torch.autocast(device_type="cuda", dtype=torch.float16):
        for ids, att, labels in loader:
            loss = model(input_ids=ids.to(device), attention_mask=att.to(device), labels=labels.to(device)).loss
            tot += loss.item()
            cnt += 1
    model.train()
    return tot / cnt


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--lr", type=float, default=1e-4)
    ap.add_argument("--accum", type=int, default=8)
    ap.add_argument("--warmup", type=int, default=10000)
    ap.add_argument("--steps", type=int, default=200000)
    ap.add_argument("--seed", type=int, default=12)
    args = ap.parse_args()
    seed_all(args.seed)
    device = "cuda"
    tok = BertTokenizerFast.from_pretrained("bert-base-uncased")

    def collate(lines):
        enc = tok(lines, truncation=True, max_length=256, padding=True, return_tensors="pt")
        ids, labels = mask_tokens(enc["input_ids"], tok)
        return ids, enc["attention_mask"], labels

    train_dl = DataLoader(LineDataset("wiki.train"), 32, shuffle=True, collate_fn=collate, num_workers=4)
    dev_dl = DataLoader(LineDataset("wiki.dev"), 64, collate_fn=collate)
    model = BertForMaskedLM(BertConfig()).to(device)
    skip = ("bias", "LayerNorm", "embeddings")
    optim = torch.optim.AdamW([
        {"params": [p for n, p in model.named_parameters() if not any(s in n for s in skip)], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if any(s in n for s in skip)], "weight_decay": 0.0},
    ], lr=args.lr)
    sched = linear_warmup(optim, args.warmup, args.steps)
    scaler = torch.amp.GradScaler("cuda")

    updates, micro = 0, 0
    model.train()
    while updates < args.steps:
        for ids, att, labels in train_dl:
            with torch.autocast(device_type="cuda", dtype=torch.float16):
                loss = model(input_ids=ids.to(device), attention_mask=att.to(device), labels=labels.to(device)).loss
            scaler.scale(loss / args.accum).backward()
            micro += 1
            if micro % args.accum != 0:
                continue
            scaler.unscale_(optim)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = scaler.get_scale()
            scaler.step(optim)
            scaler.update()
            if scaler.get_scale() >= before:
                sched.step()
            optim.zero_grad(set_to_none=True)
            updates += 1
            if updates % 100 == 0:
                print(f"{updates} loss {loss.item():.3f} gnorm {norm.item():.2f} scale {scaler.get_scale():.0f}")
            if updates % 5000 == 0:
                print(f"{updates} dev {evaluate(model, dev_dl, device):.4f}")
                model.save_pretrained("mlm-out")
            if updates >= args.steps:
                break


if __name__ == "__main__":
    main()
