import random

import numpy as np
import torch
from datasets import load_dataset
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (AutoModelForSequenceClassification, AutoTokenizer,
                          DataCollatorWithPadding, get_linear_schedule_with_warmup)

MODEL = "bert-base-uncased"
EPOCHS = 3
LR = 2e-5


def set_seed(s):
    random.seed(s)
    np.random.seed(s)
    torch.manual_seed(s)


def build_loaders(tok):
    raw = load_dataset("glue", "sst2")
    enc = raw.map(lambda b: tok(b["sentence"], truncation=True, max_length=128), batched=True)
    enc = enc.remove_columns(["sentence", "idx"]).rename_column("label", "labels")
    coll = DataCollatorWithPadding(tok)
    return (DataLoader(enc["train"], batch_size=32, shuffle=True, collate_fn=coll),
            DataLoader(enc["validation"], batch_size=64, collate_fn=coll))


def param_groups(model, wd=0.01):
    no_decay = ["bias", "LayerNorm.weight", "embeddings"]
    return [
        {"params": [p for n, p in model.named_parameters() if not any(k in n for k in no_decay)], "weight_decay": wd},
        {"params": [p for n, p in model.named_parameters() if any(k in n for k in no_decay)], "weight_decay": 0.0},
    ]


def accuracy(model, loader, device):
    model.eval()
    good = total = 0
    for batch in loader:
        batch = {k: v.to(device) for k, v in batch.items()}
        with torch.no_grad():
            logits = model(**batch).logits
        good += (logits.argmax(-1) == batch["labels"]).sum().item()
        total += len(batch["labels"])
    return good / total


def main():
    set_seed(42)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tok = AutoTokenizer.from_pretrained(MODEL)
    train_dl, val_dl = build_loaders(tok)
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=2).to(device)

    optimizer = AdamW(param_groups(model), lr=LR, betas=(0.9, 0.98))
    total_steps = EPOCHS * len(train_dl)
    scheduler = get_linear_schedule_with_warmup(optimizer, int(0.1 * total_steps), total_steps)

    for epoch in range(EPOCHS):
        model.train()
        running = 0.0
        for step, batch in enumerate(train_dl):
            batch = {k: v.to(device) for k, v in batch.items()}
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            running += loss.item()
            if (step + 1) % 100 == 0:
                print(f"epoch {epoch} step {step + 1} loss {running / 100:.4f}")
                running = 0.0
        print(f"epoch {epoch} val acc {accuracy(model, val_dl, device):.4f}")
    model.save_pretrained("sst2-bert")
    tok.save_pretrained("sst2-bert")


if __name__ == "__main__":
    main()
