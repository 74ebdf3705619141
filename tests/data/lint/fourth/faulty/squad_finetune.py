import argparse
import random

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, default_data_collator, get_linear_schedule_with_warmup

from squad_features import make_features


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="bert-base-cased")
    p.add_argument("--bs", type=int, default=8)
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--lr", type=float, default=3e-5)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--warmup", type=float, default=0.1)
    p.add_argument("--seed", type=int, default=42)
    return p.parse_args()


def decay_groups(model, wd):
    skip = ("bias", "LayerNorm", "embeddings")
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if not any(s in n for s in skip)], "weight_decay": wd},
        {"params": [p for n, p in named if any(s in n for s in skip)], "weight_decay": 0.0},
    ]


@torch.no_grad()
def span_accuracy(model, loader, device):
    model.eval()
    good = total = 0
    for batch in loader:
        batch = {k: v.to(device) for k, v in batch.items()}
        out = model(**batch)
        hit = (out.start_logits.argmax(-1) == batch["start_positions"]) & (out.end_logits.argmax(-1) == batch["end_positions"])
        good += hit.sum().item()
        total += hit.numel()
    return good / total


def main():
    args = parse()
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device("cuda")
    tok = AutoTokenizer.from_pretrained(args.model)
    train_dl = DataLoader(make_features("train", tok), args.bs, shuffle=True, collate_fn=default_data_collator, drop_last=True)
    dev_dl = DataLoader(make_features("validation", tok), 32, collate_fn=default_data_collator)
    model = AutoModelForQuestionAnswering.from_pretrained(args.model).to(device)

    optimizer = torch.optim.AdamW(decay_groups(model, 0.01), lr=args.lr, betas=(0.9, 0.98))
    total = len(train_dl) // args.accum * args.epochs
    scheduler = get_linear_schedule_with_warmup(optimizer, int(args.warmup * total), total)

    updates = 0
    for epoch in range(args.epochs):
        model.train()
        optimizer.zero_grad()
        window = 0.0
        for step, batch in enumerate(train_dl):
            batch = {k: v.to(device) for k, v in batch.items()}
            loss = model(**batch).loss / args.accum
            loss.backward()
            window += loss.item()
            if (step + 1) % args.accum == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                updates += 1
                if updates % 100 == 0:
                    print(f"update {updates}/{total} loss {window / 100:.4f} lr {scheduler.get_last_lr()[0]:.2e}")
                    window = 0.0
            scheduler.step()
        print(f"epoch {epoch}: exact span {span_accuracy(model, dev_dl, device):.4f}")
        model.save_pretrained(f"squad-epoch{epoch}")


if __name__ == "__main__":
    main()
