"""torchtitan's own Trainer on CPUs and gloo, a small Llama 3: FSDP2, TP, both, and pipelines. Shim: titan_shim.py."""

import math
import sys
import tempfile
from typing import Any

from tests.engines import titan_shim  # noqa: F401  # isort: skip
import torch
import torch.distributed as dist
from torchtitan.trainer import Trainer

from steadystep.integrations import torchtitan as guarded_titan
from tests.distributed.setting import everywhere, tensors_of
from tests.engines import study
from tests.engines.study import BAD, Plan, Ran, damage
from tests.integrations.test_examples import example

MODES = {
    2: ("fsdp2", "fsdp2 accumulate", "tp", "pp", "pp interleaved", "pp accumulate"),
    4: ("fsdp2", "fsdp2 tp", "hsdp", "pp fsdp2"),
}
LLAMA = example("torchtitan_llama")


def trainer_for(mode: str, plan: Plan, folder: str) -> Trainer:
    tensor, replicas = 2 if mode.endswith("tp") else 1, 2 if mode == "hsdp" else 1
    stages = 2 if mode.startswith("pp") else 1
    schedule = "Interleaved1F1B" if mode == "pp interleaved" else "1F1B"
    pipeline = {"pipeline_parallel_microbatch_size": 2, "pipeline_parallel_schedule": schedule} if stages > 1 else {}
    config = LLAMA.settings(
        folder,
        tuple(plan.todo()),
        run_dir=str(plan.folder()) if plan.guarded else None,
        micro_batches=2 if mode.endswith("accumulate") else 1,
        data_parallel_shard_degree=dist.get_world_size() // tensor // replicas // stages,
        data_parallel_replicate_degree=replicas,
        tensor_parallel_degree=tensor,
        pipeline_parallel_degree=stages,
        **pipeline,
    )
    return Trainer(config)


def train(mode: str, plan: Plan) -> Ran:
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_for(mode, plan, folder)
        ran, todo = Ran({}), plan.todo()
        own_step, own_loss = trainer.train_step, trainer.loss_fn

        def loss_fn(*args: Any, **kwargs: Any) -> Any:
            loss, more = own_loss(*args, **kwargs)
            bad = todo[trainer.step - 1] == BAD and dist.get_rank() == plan.bad_rank
            return (loss * math.nan if bad else loss), more

        def hidden(_: Any, __: Any, out: Any) -> Any:
            bad = todo[trainer.step - 1] == BAD and dist.get_rank() == plan.bad_rank
            return out * math.nan if bad else out

        if trainer.parallel_dims.pp_enabled:  # its schedule has the loss function already
            trainer.model_parts[0].register_forward_hook(hidden)

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
    pairs = list(zip(trainer.model_parts, trainer.optimizers.optimizers, strict=True))
    optimizer = pairs[0][1]
    for number, (part, slots) in enumerate(pairs):
        ran.tensors |= {f"{number}.{name}": value for name, value in tensors_of(part, slots).items()}
    ran.tensors["lr"] = torch.tensor(optimizer.param_groups[0]["lr"])
    if trainer.parallel_dims.pp_enabled:  # other ranks log -1
        ran.losses = next(losses for losses, is_last in everywhere((ran.losses, trainer.pp_has_last_stage)) if is_last)
    assert not optimizer._optimizer_step_pre_hooks
    return ran


if __name__ == "__main__":
    study.start()
    study.run(train, sys.argv[1].split(","), sys.argv[2].split(","))
    assert set(everywhere("end")) == {"end"}
    dist.destroy_process_group()
