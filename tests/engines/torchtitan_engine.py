"""torchtitan's own Trainer on CPUs and gloo, a small Llama 3: FSDP2, TP and both. Shim: titan_shim.py."""

import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.engines import titan_shim  # isort: skip
import torch
import torch.distributed as dist
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
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from steadystep.integrations import torchtitan as guarded_titan
from tests.distributed.setting import everywhere, tensors_of
from tests.engines import study
from tests.engines.study import BAD, Plan, Ran, damage

MODES = {2: ("fsdp2", "fsdp2 accumulate", "tp"), 4: ("fsdp2", "fsdp2 tp", "hsdp")}
WIDTH, WORDS, LENGTH = 16, 64, 16


class Words(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return WORDS


class Batches(BaseDataLoader):
    """Sequences that count upwards from a place that depends on step and rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        plan: Any = None

    def __init__(self, config: Config, *, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        self._plan, self._rank, self._size = config.plan, dp_rank, local_batch_size
        self.count = 1

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for step in self._plan.todo():
            for micro in range(self.count):
                generator = torch.Generator().manual_seed(1000 * step + 10 * micro + self._rank)
                start = torch.randint(0, WORDS, (self._size, 1), generator=generator)
                words = (start + torch.arange(LENGTH + 1)) % WORDS
                yield {"input": words[:, :-1].contiguous()}, words[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def llama() -> ModelSpec:
    rope = ComplexRoPE.Config(dim=WIDTH // 4, max_seq_len=LENGTH, theta=500.0, scaling="none")
    norm = {"weight": torch.nn.init.ones_}
    model = llama3.Llama3Model.Config(
        dim=WIDTH,
        vocab_size=WORDS,
        tok_embeddings=Embedding.Config(
            num_embeddings=WORDS, embedding_dim=WIDTH, param_init={"weight": torch.nn.init.normal_}
        ),
        norm=RMSNorm.Config(normalized_shape=WIDTH, param_init=norm),
        lm_head=Linear.Config(
            in_features=WIDTH, out_features=WORDS, param_init=llama3._output_linear_init(WIDTH)
        ),
        layers=llama3._build_llama3_layers(
            n_layers=2, dim=WIDTH, n_heads=4, hidden_dim=32, rope=rope, attn_backend="flex"
        ),
    )
    return ModelSpec(
        name="llama3",
        flavor="tiny",
        model=model,
        parallelize_fn=llama3.parallelize_llama,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )


def trainer_for(mode: str, plan: Plan, folder: str) -> Trainer:
    ranks, accumulate = dist.get_world_size(), mode.endswith("accumulate")
    tensor = 2 if mode.endswith("tp") else 1
    replicas = 2 if mode == "hsdp" else 1
    shards = ranks // tensor // replicas
    entry = ("steadystep.integrations.torchtitan.guarded", {"run_dir": str(plan.folder())}) if plan.guarded else None
    config = Trainer.Config(
        model_spec=llama(),
        loss=CrossEntropyLoss.Config(),
        dump_folder=folder,
        tokenizer=Words.Config(),
        optimizer=default_adamw(lr=1e-2, implementation="foreach"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=400),
        training=TrainingConfig(
            local_batch_size=4,
            global_batch_size=4 * shards * replicas * (2 if accumulate else 1),
            seq_len=LENGTH,
            steps=len(plan.todo()),
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        dataloader=Batches.Config(plan=plan),
        metrics=MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(
            spmd_backend="partial_dtensor",
            data_parallel_shard_degree=shards,
            data_parallel_replicate_degree=replicas,
            tensor_parallel_degree=tensor,
        ),
        checkpoint=CheckpointManager.Config(enable=False),
        debug=DebugConfig(seed=0),
        override=OverrideConfig(imports=[] if entry is None else [entry]),
    )
    return Trainer(config)


def train(mode: str, plan: Plan) -> Ran:
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_for(mode, plan, folder)
        titan_shim.add_up(trainer.model_parts[0])
        trainer.dataloader.count = trainer.gradient_accumulation_steps
        ran, todo = Ran({}), plan.todo()
        own_step, own_loss, log = trainer.train_step, trainer.loss_fn, trainer.metrics_processor.log

        def loss_fn(*args: Any, **kwargs: Any) -> Any:
            loss, more = own_loss(*args, **kwargs)
            bad = todo[trainer.step - 1] == BAD and dist.get_rank() == plan.bad_rank
            return (loss * math.nan if bad else loss), more

        def train_step(batches: Any) -> None:
            if plan.breaks(todo[trainer.step - 1]):
                damage(trainer.model_parts[0])
            own_step(batches)

        def logged(step: int, average: float, largest: float, norm: float, **kwargs: Any) -> None:
            ran.losses.append(average)
            ran.norms.append(norm)

        trainer.loss_fn, trainer.train_step, trainer.metrics_processor.log = loss_fn, train_step, logged
        if plan.guarded:
            own_watch = guarded_titan.watch

            def watch(*args: Any, **kwargs: Any) -> Any:
                watcher = own_watch(*args, **kwargs)
                watcher._tell = ran.outcomes.append
                return watcher

            guarded_titan.watch = watch
        try:
            trainer.train()
        finally:
            if plan.guarded:
                guarded_titan.watch = own_watch
        trainer.close()
    optimizer = trainer.optimizers.optimizers[0]
    ran.tensors = tensors_of(trainer.model_parts[0], optimizer)
    ran.tensors["lr"] = torch.tensor(optimizer.param_groups[0]["lr"])
    assert not optimizer._optimizer_step_pre_hooks
    return ran


if __name__ == "__main__":
    study.start()
    study.run(train, sys.argv[1].split(","), sys.argv[2].split(","))
    assert set(everywhere("end")) == {"end"}
    dist.destroy_process_group()
