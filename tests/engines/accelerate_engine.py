"""Accelerate under torchrun: DDP, and FSDP2, HSDP and ND-parallelism by its plugins.

Shim: hf_shim.py, for FSDP2 only; with tensor parallelism also for a class that transformers no longer has.
"""

import math
import sys
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import ParallelismConfig
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from steadystep.integrations import accelerate as guarded_accelerate
from tests.distributed.setting import tensors_of
from tests.engines import hf_shim, study
from tests.engines.study import BAD, Plan, Ran, damage, network, squared

MODES = {2: ("ddp", "ddp accumulate", "fsdp2", "fsdp2 accumulate"), 4: ("hsdp", "fsdp2 tp")}


def accelerator_for(mode: str, accumulate: int) -> Accelerator:
    hf_shim.fresh(shimmed=not mode.startswith("ddp"))
    common: dict[str, Any] = {"gradient_accumulation_steps": accumulate}
    if mode.startswith("ddp"):
        return Accelerator(cpu=True, **common)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=50, reshard_after_forward=True
    )
    if mode == "hsdp":
        common["parallelism_config"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=dist.get_world_size() // 2)
    if mode == "fsdp2 tp":
        hf_shim.replicate_parallel()
        common["parallelism_config"] = ParallelismConfig(dp_shard_size=dist.get_world_size() // 2, tp_size=2)
    return Accelerator(fsdp_plugin=plugin, **common)


def model_for(mode: str, accelerator: Accelerator) -> tuple[nn.Module, int]:
    """The model, and which of the batches of a step this rank gets."""
    net, mesh = network(), accelerator.torch_device_mesh
    if mode != "fsdp2 tp":
        return net, dist.get_rank()
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    net.tp_size = 2  # as transformers says it
    return net, mesh["dp_shard"].get_local_rank()


def train(mode: str, plan: Plan) -> Ran:
    accumulate = 2 if mode.endswith("accumulate") else 1
    accelerator = accelerator_for(mode, accumulate)
    net, place = model_for(mode, accelerator)
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / 400)
    model, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
    watcher = guarded_accelerate.watch(accelerator, model, optimizer, run_dir=plan.folder()) if plan.guarded else None
    ran = Ran({})
    for step in plan.todo():
        if plan.breaks(step):
            damage(model)
        ran.losses.append(0.0)
        for micro in range(accumulate):
            x = plan.batch(step, place, bad=False) + micro
            if (micro, step, dist.get_rank()) == (0, BAD, plan.bad_rank):  # not its peers in tensor parallelism
                x = x * math.nan
            with accelerator.accumulate(model):
                loss = squared(model, x)
                ran.losses[-1] += float(loss.detach()) / accumulate
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1e3)
                    ran.norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        if watcher is not None and watcher.outcome is not None:
            ran.outcomes.append(watcher.outcome)
            ran.applied.append(not accelerator.optimizer_step_was_skipped)
    if watcher is not None:
        watcher.remove()
    ran.tensors = tensors_of(accelerator.unwrap_model(model), optimizer.optimizer)
    ran.tensors["lr"] = torch.tensor(optimizer.param_groups[0]["lr"])
    return ran


if __name__ == "__main__":
    study.start()
    study.run(train, sys.argv[1].split(","), sys.argv[2].split(","))
    dist.destroy_process_group()
