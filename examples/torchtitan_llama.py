"""torchtitan with a guard, switched on by one override: a small Llama 3 with FSDP2 over all ranks.

torchrun --nproc-per-node 2 examples/torchtitan_llama.py

With torchtitan's own command line: --override.imports steadystep.integrations.torchtitan.guarded
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.config.override import OverrideConfig
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

WIDTH, WORDS, LENGTH, BAD_STEP = 16, 64, 16, 12
GUARDED = "steadystep.integrations.torchtitan.guarded"


class Words(BaseTokenizer):
    """No tokenizer: the words are numbers."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """None."""

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return WORDS


class Batches(BaseDataLoader):
    """Sequences that count upwards, from places drawn for each step and rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Which steps there are, and how many batches each has."""

        steps: tuple[int, ...] = ()
        micro_batches: int = 1

    def __init__(self, config: Config, *, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        self._config, self._rank, self._size = config, dp_rank, local_batch_size

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for step in self._config.steps:
            for micro in range(self._config.micro_batches):
                generator = torch.Generator().manual_seed(1000 * step + 10 * micro + self._rank)
                start = torch.randint(0, WORDS, (self._size, 1), generator=generator)
                words = (start + torch.arange(LENGTH + 1)) % WORDS
                yield {"input": words[:, :-1].contiguous()}, words[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def llama() -> ModelSpec:
    """Return torchtitan's Llama 3 with two small layers."""
    rope = ComplexRoPE.Config(dim=WIDTH // 4, max_seq_len=LENGTH, theta=500.0, scaling="none")
    norm = {"weight": torch.nn.init.ones_}
    model = llama3.Llama3Model.Config(
        dim=WIDTH,
        vocab_size=WORDS,
        tok_embeddings=Embedding.Config(
            num_embeddings=WORDS, embedding_dim=WIDTH, param_init={"weight": torch.nn.init.normal_}
        ),
        norm=RMSNorm.Config(normalized_shape=WIDTH, param_init=norm),
        lm_head=Linear.Config(in_features=WIDTH, out_features=WORDS, param_init=llama3._output_linear_init(WIDTH)),
        layers=llama3._build_llama3_layers(
            n_layers=2, dim=WIDTH, n_heads=4, hidden_dim=32, rope=rope, attn_backend="flex"
        ),
    )
    return ModelSpec(
        name="llama3",
        flavor="tiny",
        model=model,
        parallelize_fn=llama3.parallelize_llama,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )


def settings(folder: str, steps: tuple[int, ...], *, run_dir: str | None, **parallelism: Any) -> Trainer.Config:
    """Return torchtitan's settings; with `run_dir`, guarded."""
    micro_batches = parallelism.pop("micro_batches", 1)
    stages = parallelism.get("pipeline_parallel_degree", 1)
    ranks = torch.distributed.get_world_size() // parallelism.get("tensor_parallel_degree", 1) // stages
    batches = micro_batches * 4 // parallelism["pipeline_parallel_microbatch_size"] if stages > 1 else micro_batches
    return Trainer.Config(
        model_spec=llama(),
        loss=CrossEntropyLoss.Config(),
        dump_folder=folder,
        tokenizer=Words.Config(),
        optimizer=default_adamw(lr=1e-2, implementation="foreach"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=400),
        training=TrainingConfig(
            local_batch_size=4,
            global_batch_size=4 * ranks * micro_batches,
            seq_len=LENGTH,
            steps=len(steps),
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        dataloader=Batches.Config(steps=steps, micro_batches=batches),
        metrics=MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", **parallelism),
        checkpoint=CheckpointManager.Config(enable=False),
        debug=DebugConfig(seed=0),
        override=OverrideConfig(imports=[] if run_dir is None else [(GUARDED, {"run_dir": run_dir})]),
    )


def main() -> None:
    """Train on one rank; the loss of the last rank is NaN in one step."""
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, last = torch.distributed.get_rank(), torch.distributed.get_world_size() - 1
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(settings(folder, tuple(range(30)), run_dir=f"{folder}/guard"))
        loss_fn = trainer.loss_fn

        def bad_loss(*args: Any, **kwargs: Any) -> Any:
            loss, more = loss_fn(*args, **kwargs)
            return (loss * float("nan") if (trainer.step, rank) == (BAD_STEP, last) else loss), more

        trainer.loss_fn = bad_loss
        trainer.train()
        trainer.close()
    finite = all(bool(p.to_local().isfinite().all()) for p in trainer.model_parts[0].parameters())
    if rank == 0:
        print(f"weights finite after {trainer.step} steps: {finite}")
    assert finite
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
