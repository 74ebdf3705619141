import argparse
import math

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForTokenClassification, get_cosine_schedule_with_warmup

from conll import tagged_dataset, collator


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--lr", type=float, default=3e-5)
    ap.add_argument("--accum", type=int, default=8)
    ap.add_argument("--epochs", type=int, default=10)
    args = ap.parse_args()
    device = torch.device("cuda")
    model = AutoModelForTokenClassification.from_pretrained("roberta-base", num_labels=9).to(device)
    train_dl = DataLoader(tagged_dataset("train"), 4, shuffle=True, collate_fn=collator)
    dev_dl = DataLoader(tagged_dataset("validation"), 16, collate_fn=collator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98))
    updates_per_epoch = math.ceil(len(train_dl) / args.accum)
    total_updates = updates_per_epoch * args.epochs
    scheduler = get_cosine_schedule_with_warmup(optimizer, 200, total_updates)

    for epoch in range(args.epochs):
        model.train()
        for i, batch in enumerate(train_dl):
            batch = {k: v.to(device) for k, v in batch.items()}
            loss = model(**batch).loss / args.accum
            loss.backward()
            if (i + 1) % args.accum == 0 or i + 1 == len(train_dl):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()

        model.eval()
        dev = 0.0
        with torch.no_grad():
            for batch in dev_dl:
                dev += model(**{k: v.to(device) for k, v in batch.items()}).loss.item()
        print(epoch, dev / len(dev_dl))


if __name__ == "__main__":
    main()
