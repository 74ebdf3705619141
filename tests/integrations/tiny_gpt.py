"""A Hugging Face model from a config of a few thousand weights, and rows for it that a NaN can be put into."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

LENGTH, TOKENS, WIDTH = 12, 16, 16


def model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=TOKENS,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    return GPT2LMHeadModel(config)


def rows(bad: int | None = None, count: int = 64) -> list[dict[str, torch.Tensor]]:
    """Counting, with a wrong number now and then. `bad` is a sample with one NaN in its embedding."""
    rng = torch.Generator().manual_seed(1)
    table = torch.randn(TOKENS, WIDTH, generator=rng) * 0.1
    found = []
    for i in range(count):
        start = torch.randint(0, TOKENS, (1,), generator=rng)
        tokens = (start + torch.arange(LENGTH)) % TOKENS
        noise = torch.randint(0, TOKENS, (LENGTH,), generator=rng)
        tokens = torch.where(torch.rand(LENGTH, generator=rng) < 0.2, noise, tokens)
        embedded = table[tokens].clone()
        if i == bad:
            embedded[3, 3] = math.nan
        found.append({"inputs_embeds": embedded, "labels": tokens})
    return found


def trainer(folder: Path, *, callbacks: list[Any], bad: int | None = None, steps: int = 16, **settings: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    plain = {"report_to": [], "save_strategy": "no", "logging_steps": 4} | settings
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        seed=0,
        **plain,
    )
    return Trainer(model=model(), args=args, train_dataset=rows(bad), callbacks=callbacks)


def held_out(net: nn.Module) -> float:
    net.eval()
    batch = rows(count=256)
    with torch.no_grad():
        found = net(**{key: torch.stack([row[key] for row in batch]) for key in batch[0]})
    return float(found.loss)
