"""DeepSpeed on CPUs and gloo: ZeRO stages 0 to 3, fp32 and bf16, with accumulation. No shim."""

import os
import sys
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

from steadystep.integrations import deepspeed as guarded_deepspeed
from steadystep.integrations.zero import partitions_of
from tests.engines import study
from tests.engines.study import Plan, Ran, damage, network, squared

MODES = {
    2: ("zero0", "zero0 accumulate", "zero1", "zero2", "zero2 accumulate", "zero2 bf16", "zero3", "zero3 bf16"),
    4: ("zero1", "zero3"),
}


def made(mode: str) -> Any:
    stage, bf16 = int(mode[4]), mode.endswith("bf16")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2 if mode.endswith("accumulate") else 1,
        "gradient_clipping": 1e3,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 40},  # the small ones stay whole
    }
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / 400)
    return deepspeed.initialize(model=net, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]


def train(mode: str, plan: Plan) -> Ran:
    engine = made(mode)
    watcher = guarded_deepspeed.watch(engine, run_dir=plan.folder()) if plan.guarded else None
    ran, count = Ran({}), engine.gradient_accumulation_steps()
    for step in plan.todo():
        if plan.breaks(step):
            broken(engine)
        ran.losses.append(0.0)
        for micro in range(count):
            x = plan.batch(step, dist.get_rank(), bad=micro == 0) + micro
            loss = squared(engine, x.bfloat16() if mode.endswith("bf16") else x)
            ran.losses[-1] += float(loss.detach()) / count
            engine.backward(loss)
            engine.step()
        ran.applied.append(engine.was_step_applied())
        norm = engine.get_global_grad_norm()
        ran.norms += [] if norm is None else [float(norm)]
        if watcher is not None:
            ran.outcomes.append(watcher.outcome)
    ran.tensors = tensors(engine)
    ran.tensors["lr"] = torch.tensor(engine.get_lr()[0])
    assert engine.skipped_steps == ran.applied.count(False)
    if watcher is not None:
        watcher.remove()
        assert "step" not in vars(engine.optimizer)
        assert "backward" not in vars(engine)
    engine.destroy()
    return ran


@torch.no_grad()
def broken(engine: Any) -> None:
    """A weight that this rank trains becomes NaN; with ZeRO, one of the fp32 weights."""
    held = [part for part, _ in partitions_of(engine).weights().values() if part.numel()]
    held[0].fill_(torch.nan) if held else damage(engine.module)


def tensors(engine: Any) -> dict[str, Tensor]:
    parts = partitions_of(engine)
    found = {f"model.{name}": p.detach().clone() for name, p in engine.module.named_parameters()}
    found |= {f"fp32.{name}": part.clone() for name, (part, _) in parts.weights().items()}
    for number, slots in enumerate(parts.inner.state.values()):
        found |= {f"optimizer.{number}.{key}": torch.as_tensor(value).clone() for key, value in slots.items()}
    return found


if __name__ == "__main__":
    study.start()
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    study.run(train, sys.argv[1].split(","), sys.argv[2].split(","))
    dist.destroy_process_group()
