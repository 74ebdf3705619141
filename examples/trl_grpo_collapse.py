"""GRPO with TRL: a grader that fails for a while, with and without the guard.

Run it: python examples/trl_grpo_collapse.py (two minutes on a CPU). A tiny model created from a config learns to say
"a"; nothing is downloaded. For some steps the grader pays for "b". The policy learns that to perfection, stops saying
"a" at all, and never finds back: every group has equal rewards, which teach nothing. The guard plays
rollouts every five steps; when they earn less for a while, the best remembered state is compared with the current one,
and the policy is rolled back.
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

from steadystep.errors import TrainingHalted
from steadystep.integrations.transformers import StabilityCallback
from steadystep.rl import Controls

WORDS = ["<pad>", "<eos>", "say", "a", "b", "c", "d"]
FAILS = range(30, 120)  # steps


def main(folder: Path, *, guarded: bool = True, steps: int = 190) -> tuple[float, list[str]]:
    """Train; return the share of "a" in what the policy says at the end, and what the guard did."""
    torch.manual_seed(0)
    vocabulary = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    vocabulary.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>")
    config = GPT2Config(
        vocab_size=len(WORDS), n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1
    )

    def reward(completions: list[str], trainer_state: Any = None, **_: Any) -> list[float]:
        step = 0 if trainer_state is None else trainer_state.global_step
        paid = "b" if step in FAILS else "a"
        return [text.split().count(paid) / 6 for text in completions]

    def says_a() -> float:
        """Play eight rollouts: the true reward, from a grader that does not fail."""
        prompt = torch.tensor([[WORDS.index("say"), WORDS.index("a")]] * 8)
        said = trainer.model.generate(prompt, do_sample=True, max_new_tokens=6, min_new_tokens=6, pad_token_id=0)
        return float((said[:, 2:] == WORDS.index("a")).float().mean())

    start = folder / "start"  # the reference model of the KL term is loaded from here
    GPT2LMHeadModel(config).save_pretrained(start)
    callback = StabilityCallback(controls=Controls(evaluate=says_a))
    trainer = GRPOTrainer(
        model=str(start),
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": ["say a"] * 64}),
        args=GRPOConfig(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=6,
            learning_rate=4e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            dataloader_pin_memory=False,
            seed=0,
        ),
        callbacks=[callback] if guarded else [],
    )
    try:
        trainer.train()
    except TrainingHalted as end:  # after three rollbacks: the best policy is in place
        print(end)
    did = [f"step {o.step}: {' + '.join(o.plan.actions)} ({o.diagnosis.cause})" for o in callback.incidents]
    torch.manual_seed(1)
    return sum(says_a() for _ in range(8)) / 8, did


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        plain, _ = main(Path(folder) / "plain", guarded=False)
        kept, did = main(Path(folder) / "guarded")
    print(f"reward at the end: {plain:.2f} without the guard, {kept:.2f} with it")
    for line in did:
        print(line)
