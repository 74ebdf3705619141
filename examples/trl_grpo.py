"""GRPO with TRL and the callback. Run it: python examples/trl_grpo.py (under a minute on a CPU).

A tiny model created from a config learns to say "a"; nothing is downloaded. KL, entropy and reward, as logged by TRL,
are monitored. With `flat=True` every completion gets the same reward, which carries no training signal, and that is
reported.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from steadystep.integrations.transformers import StabilityCallback

WORDS = ["<pad>", "<eos>", "say", "a", "b", "c", "d"]


def main(folder: Path, *, guarded: bool = True, flat: bool = False, steps: int = 20) -> tuple[list[float], Any, Any]:
    """Train and return the rewards, the callback and the model."""
    torch.manual_seed(0)
    vocabulary = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    vocabulary.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>")
    config = GPT2Config(
        vocab_size=len(WORDS), n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1
    )

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [0.5 if flat else text.split().count("a") / 6 for text in completions]

    start = folder / "start"  # the reference model of the KL term is loaded from here
    GPT2LMHeadModel(config).save_pretrained(start)
    callback = StabilityCallback()
    trainer = GRPOTrainer(
        model=str(start),
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": ["say a"] * 64}),
        args=GRPOConfig(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=8,
            num_generations=8,
            max_completion_length=6,
            learning_rate=2e-2,
            beta=0.02,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            dataloader_pin_memory=False,
            seed=0,
        ),
        callbacks=[callback] if guarded else [],  # <- the added line
    )
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    return rewards, callback, trainer.model


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        rewards, callback, _ = main(Path(folder))
        print(f"reward: {rewards[0]:.2f} -> {rewards[-1]:.2f}, {len(callback.incidents)} interventions")
