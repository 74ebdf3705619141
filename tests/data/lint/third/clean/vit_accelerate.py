import argparse
import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoImageProcessor, AutoModelForImageClassification, get_scheduler


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--model_name", default="google/vit-base-patch16-224-in21k")
    p.add_argument("--dataset", default="beans")
    p.add_argument("--per_device_batch", type=int, default=8)
    p.add_argument("--accumulation", type=int, default=4)
    p.add_argument("--lr", type=float, default=5e-5)
    p.add_argument("--weight_decay", type=float, default=0.01)
    p.add_argument("--epochs", type=int, default=40)
    p.add_argument("--warmup", type=float, default=0.1)
    p.add_argument("--seed", type=int, default=11)
    return p.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulation, mixed_precision="fp16")
    set_seed(args.seed)
    ds = load_dataset(args.dataset)
    names = ds["train"].features["labels"].names
    proc = AutoImageProcessor.from_pretrained(args.model_name)

    def collate(rows):
        px = proc([r["image"].convert("RGB") for r in rows], return_tensors="pt")["pixel_values"]
        return {"pixel_values": px, "labels": torch.tensor([r["labels"] for r in rows])}

    train_dl = DataLoader(ds["train"], args.per_device_batch, shuffle=True, collate_fn=collate)
    eval_dl = DataLoader(ds["validation"], args.per_device_batch, collate_fn=collate)
    model = AutoModelForImageClassification.from_pretrained(args.model_name, num_labels=len(names))
    no_decay = ["bias", "layernorm", "LayerNorm", "embeddings"]
    grouped = [
        {"params": [p for n, p in model.named_parameters() if not any(k in n for k in no_decay)],
         "weight_decay": args.weight_decay},
        {"params": [p for n, p in model.named_parameters() if any(k in n for k in no_decay)],
         "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(grouped, lr=args.lr, betas=(0.9, 0.98))
    model, optimizer, train_dl, eval_dl = accelerator.prepare(model, optimizer, train_dl, eval_dl)
    updates = math.ceil(len(train_dl) / args.accumulation) * args.epochs
    lr_scheduler = get_scheduler("linear", optimizer, int(args.warmup * updates) * accelerator.num_processes,
                                 updates * accelerator.num_processes)
    lr_scheduler = accelerator.prepare(lr_scheduler)

    best = 0.0
    for epoch in range(args.epochs):
        model.train()
        total = 0.0
        for batch in train_dl:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                total += loss.detach().float()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

        model.eval()
        right = seen = 0
        for batch in eval_dl:
            with torch.no_grad():
                logits = model(**batch).logits
            preds, refs = accelerator.gather_for_metrics((logits.argmax(-1), batch["labels"]))
            right += (preds == refs).sum().item()
            seen += refs.numel()
        acc = right / seen
        accelerator.print(f"epoch {epoch} loss {total.item() / len(train_dl):.4f} acc {acc:.4f}")
        if acc > best:
            best = acc
            accelerator.wait_for_everyone()
            accelerator.unwrap_model(model).save_pretrained("vit-out", save_function=accelerator.save)


if __name__ == "__main__":
    main()
