"""Fine-tune a seq2seq model on subtitle pairs; the loss is normalised by the tokens of the whole virtual batch."""
import itertools
import json

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, get_inverse_sqrt_schedule

NAME = "Helsinki-NLP/opus-mt-en-fi"
device = torch.device("cuda")
tok = AutoTokenizer.from_pretrained(NAME)


class Lines(Dataset):
    def __init__(self, path):
        with open(path) as f:
            self.rows = [json.loads(l) for l in f]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]["en"], self.rows[i]["fi"]


def pack(pairs):
    src, tgt = zip(*pairs)
    enc = tok(list(src), text_target=list(tgt), padding=True, truncation=True, max_length=96, return_tensors="pt")
    enc["labels"][enc["labels"] == tok.pad_token_id] = -100
    return enc


def chunks(it, n):
    it = iter(it)
    while True:
        part = list(itertools.islice(it, n))
        if not part:
            return
        yield part


def summed_nll(model, batch):
    batch = {k: v.to(device) for k, v in batch.items()}
    logits = model(**batch).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")


@torch.no_grad()
def dev_nll(model, loader):
    mode = model.training
    model.eval()
    s = n = 0
    for b in loader:
        s += summed_nll(model, b).item()
        n += (b["labels"] != -100).sum().item()
    model.train(mode)
    return s / n


def main():
    model = AutoModelForSeq2SeqLM.from_pretrained(NAME).to(device)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-5, betas=(0.9, 0.98), weight_decay=0.0)
    sched = get_inverse_sqrt_schedule(opt, num_warmup_steps=1000)
    train = DataLoader(Lines("train.jsonl"), 32, shuffle=True, collate_fn=pack, num_workers=4)
    dev = DataLoader(Lines("dev.jsonl"), 64, collate_fn=pack)
    model.train()
    update = 0
    for epoch in range(3):
        for group in chunks(train, 8):
            tokens = sum((b["labels"] != -100).sum().item() for b in group)
            shown = 0.0
            for b in group:
                loss = summed_nll(model, b) / tokens
                loss.backward()
                shown += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            opt.zero_grad()
            update += 1
            if update % 50 == 0:
                print(f"{update} nll/token {shown:.4f} lr {sched.get_last_lr()[0]:.2e}")
            if update % 1000 == 0:
                print("dev", dev_nll(model, dev))
    model.save_pretrained("subtitle-mt")


if __name__ == "__main__":
    main()
