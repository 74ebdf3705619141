"""Council minutes -> abstract. LoRA-free full fine-tune of a small T5."""
import argparse

import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import (AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, get_cosine_schedule_with_warmup)


def build_data(tok, args):
    raw = load_dataset("json", data_files={"train": args.train, "dev": args.dev})

    def prep(b):
        x = tok(["summarize: " + t for t in b["minutes"]], max_length=1024, truncation=True)
        x["labels"] = tok(text_target=b["abstract"], max_length=160, truncation=True)["input_ids"]
        return x

    return raw.map(prep, batched=True, remove_columns=raw["train"].column_names)


def mean_dev_loss(model, loader, device):
    model.eval()
    vals = []
    with torch.no_grad():
        for b in loader:
            vals.append(model(**b.to(device)).loss.item())
    model.train()
    return sum(vals) / len(vals)


class Loop:
    def __init__(self, model, opt, sched, accum, device):
        self.model, self.opt, self.sched = model, opt, sched
        self.accum, self.device = accum, device
        self.micro = 0

    def feed(self, batch):
        loss = self.model(**batch.to(self.device)).loss
        (loss / self.accum).backward()
        self.micro += 1
        if self.micro % self.accum == 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.opt.step()
            self.opt.zero_grad(set_to_none=True)
        self.sched.step()
        return loss.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--train", required=True)
    ap.add_argument("--dev", required=True)
    ap.add_argument("--model", default="google/flan-t5-small")
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--accum", type=int, default=16)
    ap.add_argument("--lr", type=float, default=1e-4)
    args = ap.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda")
    tok = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSeq2SeqLM.from_pretrained(args.model).to(device)
    data = build_data(tok, args)
    coll = DataCollatorForSeq2Seq(tok, model=model)
    train = DataLoader(data["train"], 2, shuffle=True, collate_fn=coll, drop_last=True)
    dev = DataLoader(data["dev"], 4, collate_fn=coll)
    updates = args.epochs * len(train) // args.accum
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0)
    sched = get_cosine_schedule_with_warmup(opt, num_warmup_steps=int(0.15 * updates), num_training_steps=updates)
    loop = Loop(model, opt, sched, args.accum, device)
    model.train()
    for ep in range(args.epochs):
        shown = 0.0
        for k, b in enumerate(train, 1):
            shown += loop.feed(b)
            if k % 400 == 0:
                print(f"{ep}/{k} {shown / 400:.4f} lr {sched.get_last_lr()[0]:.2e}")
                shown = 0.0
        print("dev loss", mean_dev_loss(model, dev, device))
    model.save_pretrained("minutes-t5")
    tok.save_pretrained("minutes-t5")


if __name__ == "__main__":
    main()
