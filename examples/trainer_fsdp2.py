"""Hugging Face `Trainer` with FSDP2 and a guard: a NaN in the batch of one rank, skipped on both.

torchrun --nproc-per-node 2 examples/trainer_fsdp2.py      # python examples/trainer_fsdp2.py does the same
"""

import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch


def rows() -> list[dict[str, torch.Tensor]]:
    """Return sequences that count upwards, as embeddings, so that one of them can hold a NaN."""
    table = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)) * 0.1
    found = []
    for i in range(64):
        tokens = (i + torch.arange(12)) % 16
        embedded = table[tokens].clone()
        if i == 7:
            embedded[0, 0] = math.nan
        found.append({"inputs_embeds": embedded, "labels": tokens})
    return found


def gloo_as_accelerator() -> None:
    """Without a GPU Accelerate has no FSDP: tell it that gloo serves several. Leave this out where there are GPUs."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)


def main(output_dir: Path) -> Any:
    """Train on one rank, and return the callback."""
    if not torch.cuda.is_available():
        gloo_as_accelerator()
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from steadystep.integrations.transformers import StabilityCallback

    torch.manual_seed(0)
    size = {"vocab_size": 16, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**size, loss_type="ForCausalLM", tie_word_embeddings=False))
    callback = StabilityCallback()
    arguments = TrainingArguments(
        output_dir=str(output_dir),
        max_steps=16,
        learning_rate=1e-2,
        logging_steps=8,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]},
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows(), callbacks=[callback])  # <- the added callback
    trainer.train()
    finite = all(bool(p.to_local().isfinite().all()) for p in trainer.model.parameters())
    if trainer.is_world_process_zero():
        for outcome in callback.incidents:
            print(f"step {outcome.step}: {', '.join(outcome.plan.actions)}; {outcome.origin}")
        print(f"weights finite: {finite}")
    assert finite
    assert callback.incidents
    torch.distributed.destroy_process_group()
    return callback


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(Path(os.environ.get("OUTPUT_DIR", "out")))
    else:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"OUTPUT_DIR": folder}
            sys.exit(subprocess.run(launch, check=False, env=environment).returncode)
