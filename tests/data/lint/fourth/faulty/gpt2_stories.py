import argparse
import math
import os

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2LMHeadModel, GPT2TokenizerFast


class Blocks(Dataset):
    def __init__(self, path, tok, block):
        ids = tok(open(path, encoding="utf-8").read())["input_ids"]
        self.data = torch.tensor(ids[: len(ids) // block * block]).view(-1, block)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return self.data[i]


def perplexity(model, loader, device):
    model.eval()
    total, n = 0.0, 0
    with torch.no_grad():
        for ids in loader:
            ids = ids.to(device)
            total += model(ids, labels=ids).loss.item()
            n += 1
    return math.exp(total / n)


class Finetuner:
    def __init__(self, args):
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tok = GPT2TokenizerFast.from_pretrained("gpt2")
        self.model = GPT2LMHeadModel.from_pretrained("gpt2").to(self.device)
        self.train_dl = DataLoader(Blocks(args.train, self.tok, args.block), args.bs, shuffle=True, drop_last=True)
        self.val_dl = DataLoader(Blocks(args.val, self.tok, args.block), args.bs)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.0)
        updates = args.epochs * (len(self.train_dl) // args.grad_acc)
        self.sched = torch.optim.lr_scheduler.LambdaLR(self.opt, lambda s: max(0.0, 1 - s / max(1, updates)))

    def _update(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step()
        self.sched.step()
        self.opt.zero_grad()

    def epoch(self):
        self.model.train()
        self.opt.zero_grad()
        shown = 0.0
        for i, ids in enumerate(self.train_dl, start=1):
            ids = ids.to(self.device)
            loss = self.model(ids, labels=ids).loss
            loss.backward()
            shown += loss.item()
            if i % self.args.grad_acc == 0:
                self._update()
                print(f"  micro {i} loss {shown / self.args.grad_acc:.4f}")
                shown = 0.0

    def run(self):
        best = float("inf")
        for e in range(self.args.epochs):
            self.epoch()
            ppl = perplexity(self.model, self.val_dl, self.device)
            print(f"epoch {e} val ppl {ppl:.2f}")
            if ppl < best:
                best = ppl
                self.model.save_pretrained(os.path.join(self.args.out, "best"))


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--train", default="train.txt")
    p.add_argument("--val", default="val.txt")
    p.add_argument("--out", default="out")
    p.add_argument("--block", type=int, default=512)
    p.add_argument("--bs", type=int, default=4)
    p.add_argument("--grad_acc", type=int, default=16)
    p.add_argument("--lr", type=float, default=5e-5)
    p.add_argument("--epochs", type=int, default=4)
    Finetuner(p.parse_args()).run()
