import argparse
import math

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import Wav2Vec2ForCTC, Wav2Vec2Processor, get_linear_schedule_with_warmup

from cv_czech import CommonVoice, CTCCollator


class Meter:
    """Mean of everything pushed since the last reset."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.total, self.count = 0.0, 0

    def push(self, value):
        if math.isnan(value) or math.isinf(value):
            return
        self.total += value
        self.count += 1

    def mean(self):
        return self.total / max(1, self.count)


def evaluate(accelerator, model, loader):
    model.eval()
    tot = n = 0.0
    for batch in loader:
        with torch.no_grad():
            loss = model(**batch).loss
        tot += accelerator.gather(loss).mean().item()
        n += 1
    return tot / n


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--base", default="facebook/wav2vec2-xls-r-300m")
    ap.add_argument("--lr", type=float, default=1e-4)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--epochs", type=int, default=10)
    args = ap.parse_args()
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=args.accum)
    proc = Wav2Vec2Processor.from_pretrained("./processor")
    model = Wav2Vec2ForCTC.from_pretrained(args.base, vocab_size=len(proc.tokenizer), ctc_loss_reduction="mean",
                                           pad_token_id=proc.tokenizer.pad_token_id)
    model.freeze_feature_encoder()
    train_dl = DataLoader(CommonVoice("train", proc), 8, shuffle=True, collate_fn=CTCCollator(proc))
    dev_dl = DataLoader(CommonVoice("dev", proc), 8, collate_fn=CTCCollator(proc))
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    total = math.ceil(len(train_dl) / args.accum) * args.epochs
    sched = get_linear_schedule_with_warmup(opt, 2000, total)
    model, opt, train_dl, dev_dl, sched = accelerator.prepare(model, opt, train_dl, dev_dl, sched)

    meter = Meter()
    updates = 0
    for epoch in range(args.epochs):
        model.train()
        for batch in train_dl:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                sched.step()
                opt.zero_grad()
            meter.push(loss.item())
            if accelerator.sync_gradients:
                updates += 1
                if updates % 25 == 0:
                    accelerator.print(f"update {updates} loss {meter.mean():.4f}")
                    meter.reset()
        accelerator.print(f"epoch {epoch} dev {evaluate(accelerator, model, dev_dl):.4f}")
    accelerator.unwrap_model(model).save_pretrained("xlsr-czech")


if __name__ == "__main__":
    main()
