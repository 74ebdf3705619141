import argparse
import math

import evaluate
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_from_disk
from torch.utils.data import DataLoader
from transformers import (AutoModelForTokenClassification, AutoTokenizer, DataCollatorForTokenClassification,
                          get_linear_schedule_with_warmup)


def options():
    ap = argparse.ArgumentParser("clinical NER")
    ap.add_argument("--corpus", required=True)
    ap.add_argument("--encoder", default="emilyalsentzer/Bio_ClinicalBERT")
    ap.add_argument("--lr", type=float, default=3e-5)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--per-device", type=int, default=16)
    ap.add_argument("--accum", type=int, default=2)
    ap.add_argument("--out", default="ner-out")
    return ap.parse_args()


def split_decay(model, wd):
    skip = ("bias", "LayerNorm.weight", "embeddings")
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if not any(s in n for s in skip)], "weight_decay": wd},
        {"params": [p for n, p in named if any(s in n for s in skip)], "weight_decay": 0.0},
    ]


def decode(pred, gold, names):
    keep = [[(p, g) for p, g in zip(ps, gs) if g != -100] for ps, gs in zip(pred, gold)]
    return ([[names[p] for p, _ in s] for s in keep], [[names[g] for _, g in s] for s in keep])


def main():
    o = options()
    set_seed(11)
    acc = Accelerator(gradient_accumulation_steps=o.accum, mixed_precision="fp16")
    ds = load_from_disk(o.corpus)
    names = ds["train"].features["labels"].feature.names
    tok = AutoTokenizer.from_pretrained(o.encoder)
    model = AutoModelForTokenClassification.from_pretrained(o.encoder, num_labels=len(names))
    collate = DataCollatorForTokenClassification(tok, pad_to_multiple_of=8)
    train_dl = DataLoader(ds["train"], o.per_device, shuffle=True, collate_fn=collate)
    dev_dl = DataLoader(ds["validation"], 2 * o.per_device, collate_fn=collate)

    opt = torch.optim.AdamW(split_decay(model, 0.01), lr=o.lr, betas=(0.9, 0.98))
    model, opt, train_dl, dev_dl = acc.prepare(model, opt, train_dl, dev_dl)
    updates = o.epochs * math.ceil(len(train_dl) / o.accum)
    sched = get_linear_schedule_with_warmup(opt, int(0.1 * updates), updates)
    metric = evaluate.load("seqeval")

    for epoch in range(o.epochs):
        model.train()
        running = torch.zeros((), device=acc.device)
        for batch in train_dl:
            with acc.accumulate(model):
                loss = model(**batch).loss
                acc.backward(loss)
                if acc.sync_gradients:
                    acc.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                if acc.sync_gradients:
                    sched.step()
                opt.zero_grad()
            running += loss.detach().float()

        model.eval()
        for batch in dev_dl:
            with torch.no_grad():
                logits = model(**batch).logits
            pred = acc.pad_across_processes(logits.argmax(-1), dim=1, pad_index=-100)
            gold = acc.pad_across_processes(batch["labels"], dim=1, pad_index=-100)
            pred, gold = acc.gather_for_metrics((pred, gold))
            p, g = decode(pred.tolist(), gold.tolist(), names)
            metric.add_batch(predictions=p, references=g)
        score = metric.compute()
        acc.print(f"epoch {epoch} loss {running.item() / len(train_dl):.4f} f1 {score['overall_f1']:.4f}")

    acc.wait_for_everyone()
    acc.unwrap_model(model).save_pretrained(o.out, save_function=acc.save)


if __name__ == "__main__":
    main()
