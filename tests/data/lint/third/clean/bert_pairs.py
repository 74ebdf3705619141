"""Sentence-pair classification with a transformers encoder and a plain loop."""
import argparse
import random

import numpy as np
import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import (AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding,
                          get_linear_schedule_with_warmup)


def seed_all(s):
    random.seed(s)
    np.random.seed(s)
    torch.manual_seed(s)
    torch.cuda.manual_seed_all(s)


def prepare(name, tok, max_len):
    raw = load_dataset("glue", name)
    enc = raw.map(lambda r: tok(r["sentence1"], r["sentence2"], truncation=True, max_length=max_len), batched=True,
                  remove_columns=["sentence1", "sentence2", "idx"])
    return enc.rename_column("label", "labels")


@torch.inference_mode()
def score(model, loader, device):
    model.eval()
    preds, refs, conf = [], [], []
    for b in loader:
        b = {k: v.to(device) for k, v in b.items()}
        probs = torch.softmax(model(**b).logits.float(), -1)
        conf.append(probs.max(-1).values.cpu())
        preds.append(probs.argmax(-1).cpu())
        refs.append(b["labels"].cpu())
    preds, refs = torch.cat(preds), torch.cat(refs)
    return (preds == refs).float().mean().item(), torch.cat(conf).mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="bert-base-uncased")
    ap.add_argument("--task", default="mrpc")
    ap.add_argument("--bs", type=int, default=32)
    ap.add_argument("--accum", type=int, default=2)
    ap.add_argument("--lr", type=float, default=3e-5)
    ap.add_argument("--epochs", type=int, default=4)
    a = ap.parse_args()
    seed_all(13)
    device = torch.device("cuda")
    tok = AutoTokenizer.from_pretrained(a.model)
    ds = prepare(a.task, tok, 128)
    coll = DataCollatorWithPadding(tok)
    tr = DataLoader(ds["train"], a.bs, shuffle=True, collate_fn=coll, drop_last=True)
    va = DataLoader(ds["validation"], 64, collate_fn=coll)
    model = AutoModelForSequenceClassification.from_pretrained(a.model, num_labels=2).to(device)
    skip = ("bias", "LayerNorm.weight", "embeddings")
    opt = torch.optim.AdamW([
        {"params": [p for n, p in model.named_parameters() if not any(s in n for s in skip)], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if any(s in n for s in skip)], "weight_decay": 0.0}], lr=a.lr,
        betas=(0.9, 0.98), eps=1e-6)
    updates = (len(tr) // a.accum) * a.epochs
    sched = get_linear_schedule_with_warmup(opt, num_warmup_steps=updates // 4, num_training_steps=updates)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(a.epochs):
        model.train()
        running = 0.0
        opt.zero_grad()
        for step, batch in enumerate(tr, 1):
            batch = {k: v.to(device) for k, v in batch.items()}
            with torch.amp.autocast("cuda", dtype=torch.float16):
                loss = model(**batch).loss
            scaler.scale(loss / a.accum).backward()
            running += loss.item()
            if step % a.accum == 0:
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                before = scaler.get_scale()
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
                if scaler.get_scale() >= before:
                    sched.step()
        acc, conf = score(model, va, device)
        print(f"epoch {epoch} train {running / len(tr):.4f} val acc {acc:.4f} mean confidence {conf:.3f}")


if __name__ == "__main__":
    main()
