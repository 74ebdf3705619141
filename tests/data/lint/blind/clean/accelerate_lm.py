from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator, get_cosine_schedule_with_warmup

from corpus import packed_blocks


@dataclass
class Config:
    base: str = "gpt2"
    lr: float = 2e-4
    warmup: int = 2000
    steps: int = 40_000
    batch: int = 8
    log_every: int = 100


def evaluate(accelerator, model, loader):
    model.eval()
    losses = []
    with torch.inference_mode():
        for batch in loader:
            out = model(**batch)
            losses.append(accelerator.gather(out.loss.repeat(batch["input_ids"].size(0))))
    model.train()
    return torch.cat(losses).mean().item()


def run(cfg: Config):
    accelerator = Accelerator(mixed_precision="bf16")
    set_seed(11)
    tok = AutoTokenizer.from_pretrained(cfg.base)
    train = DataLoader(packed_blocks(tok, "train"), cfg.batch, shuffle=True, collate_fn=default_data_collator)
    valid = DataLoader(packed_blocks(tok, "validation"), cfg.batch, collate_fn=default_data_collator)
    model = AutoModelForCausalLM.from_pretrained(cfg.base)
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.999), weight_decay=0.1)
    sched = get_cosine_schedule_with_warmup(opt, num_warmup_steps=cfg.warmup, num_training_steps=cfg.steps)
    model, opt, train, valid, sched = accelerator.prepare(model, opt, train, valid, sched)

    step = 0
    model.train()
    while step < cfg.steps:
        for batch in train:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            opt.zero_grad()
            step += 1
            if step % cfg.log_every == 0:
                accelerator.print(step, loss.item())
            if step % 2000 == 0:
                accelerator.print("eval", evaluate(accelerator, model, valid))
            if step >= cfg.steps:
                break
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained("out")


if __name__ == "__main__":
    run(Config())
