import argparse
import math

import torch
import torch.nn as nn
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

from instruct_data import InstructDataset, Collator


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, r=8, alpha=16, dropout=0.05):
        super().__init__()
        self.base = base
        for p in self.base.parameters():
            p.requires_grad = False
        self.a = nn.Parameter(torch.empty(r, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, r))
        self.drop = nn.Dropout(dropout)
        self.scale = alpha / r
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x):
        return self.base(x) + self.drop(x) @ self.a.t() @ self.b.t() * self.scale


def inject(model, names=("q_proj", "v_proj")):
    for p in model.parameters():
        p.requires_grad = False
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(module, name, LoRALinear(child))
    return model


def perplexity(model, loader, accelerator):
    model.eval()
    losses = []
    for batch in loader:
        with torch.no_grad():
            loss = model(**batch).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(batch["input_ids"].size(0))))
    model.train()
    return math.exp(torch.cat(losses).mean().item())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--base", default="meta-llama/Llama-3.2-1B")
    ap.add_argument("--train", default="train.jsonl")
    ap.add_argument("--dev", default="dev.jsonl")
    ap.add_argument("--lr", type=float, default=2e-4)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--accum", type=int, default=16)
    args = ap.parse_args()

    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=args.accum)
    tok = AutoTokenizer.from_pretrained(args.base)
    tok.pad_token = tok.eos_token
    model = inject(AutoModelForCausalLM.from_pretrained(args.base))
    trainable = [p for p in model.parameters() if p.requires_grad]
    accelerator.print(f"{sum(p.numel() for p in trainable):,} trainable parameters")
    optimizer = torch.optim.AdamW(trainable, lr=args.lr, weight_decay=0.0, betas=(0.9, 0.95))

    train_dl = DataLoader(InstructDataset(args.train, tok), 2, shuffle=True, collate_fn=Collator(tok))
    dev_dl = DataLoader(InstructDataset(args.dev, tok), 4, collate_fn=Collator(tok))
    total = math.ceil(len(train_dl) / args.accum) * args.epochs
    scheduler = get_cosine_schedule_with_warmup(optimizer, max(100, int(0.03 * total)), total)
    model, optimizer, train_dl, dev_dl, scheduler = accelerator.prepare(
        model, optimizer, train_dl, dev_dl, scheduler)

    done = 0
    model.train()
    for epoch in range(args.epochs):
        for batch in train_dl:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(trainable, 1.0)
                    done += 1
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and done % 20 == 0:
                accelerator.print(f"update {done}/{total} loss {loss.item():.4f}")
        accelerator.print(f"epoch {epoch} dev ppl {perplexity(model, dev_dl, accelerator):.3f}")
    if accelerator.is_main_process:
        state = accelerator.unwrap_model(model).state_dict()
        torch.save({k: v for k, v in state.items() if k.endswith((".a", ".b"))}, "lora.pt")


if __name__ == "__main__":
    main()
