import argparse

import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import (AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding,
                          get_linear_schedule_with_warmup)


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--model_name", default="bert-base-uncased")
    p.add_argument("--learning_rate", type=float, default=3e-5)
    p.add_argument("--num_epochs", type=int, default=3)
    p.add_argument("--gradient_accumulation_steps", type=int, default=2)
    return p.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    tok = AutoTokenizer.from_pretrained(args.model_name)
    raw = load_dataset("glue", "mnli")

    def encode(batch):
        out = tok(batch["premise"], batch["hypothesis"], truncation=True, max_length=128)
        out["labels"] = batch["label"]
        return out

    data = raw.map(encode, batched=True, remove_columns=raw["train"].column_names)
    collate = DataCollatorWithPadding(tok)
    train_dl = DataLoader(data["train"], shuffle=True, batch_size=32, collate_fn=collate)
    eval_dl = DataLoader(data["validation_matched"], batch_size=64, collate_fn=collate)
    model = AutoModelForSequenceClassification.from_pretrained(args.model_name, num_labels=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.01)
    model, optimizer, train_dl, eval_dl = accelerator.prepare(model, optimizer, train_dl, eval_dl)
    total = args.num_epochs * len(train_dl) // args.gradient_accumulation_steps
    scheduler = accelerator.prepare(get_linear_schedule_with_warmup(optimizer, 2000, total))

    for epoch in range(args.num_epochs):
        model.train()
        for batch in train_dl:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                accelerator.backward(outputs.loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        model.eval()
        right = seen = 0
        for batch in eval_dl:
            with torch.no_grad():
                logits = model(**batch).logits
            preds, refs = accelerator.gather_for_metrics((logits.argmax(-1), batch["labels"]))
            right += (preds == refs).sum().item()
            seen += refs.numel()
        accelerator.print(f"epoch {epoch}: accuracy {right / seen:.4f}")


if __name__ == "__main__":
    main()
