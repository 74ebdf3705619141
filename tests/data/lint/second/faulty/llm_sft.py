import argparse
import json
import math

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup


class SFTDataset(Dataset):
    def __init__(self, path, tok, max_len=1024):
        self.rows = []
        with open(path) as f:
            for line in f:
                r = json.loads(line)
                p = tok(r["prompt"]).input_ids
                a = tok(r["answer"] + tok.eos_token, add_special_tokens=False).input_ids
                self.rows.append(((p + a)[:max_len], ([-100] * len(p) + a)[:max_len]))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def pad_rows(rows, pad_id):
    n = max(len(r[0]) for r in rows)
    ids = torch.tensor([r[0] + [pad_id] * (n - len(r[0])) for r in rows])
    labels = torch.tensor([r[1] + [-100] * (n - len(r[1])) for r in rows])
    att = torch.tensor([[1] * len(r[0]) + [0] * (n - len(r[0])) for r in rows])
    return {"input_ids": ids, "attention_mask": att, "labels": labels}


def evaluate(model, loader, device):
    model.eval()
    out = []
    with torch.no_grad():
        for b in loader:
            out.append(model(**{k: v.to(device) for k, v in b.items()}).loss.item())
    model.train()
    return sum(out) / len(out)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="gpt2-medium")
    ap.add_argument("--lr", type=float, default=2e-5)
    ap.add_argument("--batch", type=int, default=4)
    ap.add_argument("--accum", type=int, default=16)
    ap.add_argument("--epochs", type=int, default=3)
    args = ap.parse_args()
    torch.manual_seed(0)
    device = "cuda"
    tok = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model).to(device)
    collate = lambda rows: pad_rows(rows, tok.eos_token_id)
    train_dl = DataLoader(SFTDataset("train.jsonl", tok), args.batch, shuffle=True, collate_fn=collate)
    dev_dl = DataLoader(SFTDataset("dev.jsonl", tok), args.batch, collate_fn=collate)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    updates = args.epochs * math.ceil(len(train_dl) / args.accum)
    sched = get_cosine_schedule_with_warmup(opt, max(100, updates // 20), updates)

    model.train()
    for epoch in range(args.epochs):
        for i, batch in enumerate(train_dl, 1):
            batch = {k: v.to(device) for k, v in batch.items()}
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(**batch).loss
            (loss / args.accum).backward()
            if i % args.accum == 0 or i == len(train_dl):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad(set_to_none=True)
            sched.step()
            if i % 100 == 0:
                print(f"epoch {epoch} {i}/{len(train_dl)} loss {loss.item():.4f} lr {sched.get_last_lr()[0]:.2e}")
        print(f"epoch {epoch} dev loss {evaluate(model, dev_dl, device):.4f}")
        model.save_pretrained(f"sft-epoch{epoch}")


if __name__ == "__main__":
    main()
