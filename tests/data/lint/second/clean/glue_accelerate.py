import argparse
import math

import evaluate
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import (AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding,
                          get_scheduler)


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--model_name", default="bert-base-cased")
    p.add_argument("--task", default="mrpc")
    p.add_argument("--batch_size", type=int, default=16)
    p.add_argument("--learning_rate", type=float, default=5e-5)
    p.add_argument("--weight_decay", type=float, default=0.01)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--gradient_accumulation_steps", type=int, default=2)
    p.add_argument("--seed", type=int, default=42)
    return p.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)
    tok = AutoTokenizer.from_pretrained(args.model_name)
    raw = load_dataset("glue", args.task)

    def encode(ex):
        out = tok(ex["sentence1"], ex["sentence2"], truncation=True, max_length=128)
        out["labels"] = ex["label"]
        return out

    with accelerator.main_process_first():
        ds = raw.map(encode, batched=True, remove_columns=raw["train"].column_names)
    collate = DataCollatorWithPadding(tok, pad_to_multiple_of=8)
    train_dl = DataLoader(ds["train"], shuffle=True, collate_fn=collate, batch_size=args.batch_size)
    eval_dl = DataLoader(ds["validation"], collate_fn=collate, batch_size=args.batch_size)

    model = AutoModelForSequenceClassification.from_pretrained(args.model_name, num_labels=2)
    no_decay = ["bias", "LayerNorm.weight"]
    groups = [
        {"params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
         "weight_decay": args.weight_decay},
        {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)],
         "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate)
    updates = math.ceil(len(train_dl) / args.gradient_accumulation_steps) * args.epochs
    lr_scheduler = get_scheduler("linear", optimizer=optimizer, num_warmup_steps=0,
                                 num_training_steps=updates * accelerator.num_processes)
    model, optimizer, train_dl, eval_dl, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dl, eval_dl, lr_scheduler)
    metric = evaluate.load("glue", args.task)
    bar = tqdm(range(updates), disable=not accelerator.is_local_main_process)

    for epoch in range(args.epochs):
        model.train()
        total_loss = 0
        for step, batch in enumerate(train_dl):
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs.loss
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                bar.update(1)

        model.eval()
        for batch in eval_dl:
            with torch.no_grad():
                outputs = model(**batch)
            preds, refs = accelerator.gather_for_metrics((outputs.logits.argmax(dim=-1), batch["labels"]))
            metric.add_batch(predictions=preds, references=refs)
        accelerator.print(f"epoch {epoch}: {metric.compute()} loss {total_loss.item() / len(train_dl):.4f}")


if __name__ == "__main__":
    main()
