"""Hugging Face `Trainer` with one added callback. Run it: python examples/transformers_trainer.py (half a minute).

A tiny GPT-2 created from a config learns to count; nothing is downloaded. One training sample holds a NaN.
"""

import math
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from steadystep.integrations.transformers import StabilityCallback


def rows(bad: int | None) -> list[dict[str, torch.Tensor]]:
    """Return sequences that count upwards, as embeddings, so that one of them can hold a NaN."""
    table = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)) * 0.1
    found = []
    for i in range(64):
        tokens = (i + torch.arange(12)) % 16
        embedded = table[tokens].clone()
        if i == bad:
            embedded[0, 0] = math.nan
        found.append({"inputs_embeds": embedded, "labels": tokens})
    return found


def main(output_dir: Path, *, guarded: bool = True, steps: int = 32) -> tuple[bool, Any]:
    """Train and return whether the weights are finite, and the callback."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=16, n_positions=12, n_embd=16, n_layer=2, n_head=2, loss_type="ForCausalLM")
    callback = StabilityCallback()
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=str(output_dir),
            max_steps=steps,
            learning_rate=1e-2,
            logging_steps=8,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=rows(bad=7),
        callbacks=[callback] if guarded else [],  # <- the added line
    )
    trainer.train()
    return all(bool(p.isfinite().all()) for p in trainer.model.parameters()), callback


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        finite, callback = main(Path(folder))
        for outcome in callback.incidents:
            print(f"step {outcome.step}: {', '.join(outcome.plan.actions)}; {outcome.origin}")
        print(f"guarded: weights finite: {finite}")
        print(f"unguarded: weights finite: {main(Path(folder), guarded=False)[0]}")
