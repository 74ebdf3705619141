"""A small model on several ranks, guarded or not, and what all ranks must agree on."""

import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import steadystep
from steadystep._utils.tensors import local_part

STEPS = 12


def start() -> int:
    """Join the process group; returns the rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    return dist.get_rank()


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    )


def plain_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 15), nn.Tanh(), nn.Linear(15, 1))


def made(kind: str, make: Callable[[], nn.Module] = network, lr: float = 1e-2) -> tuple[nn.Module, Optimizer]:
    model = make()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * step + rank))


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).squeeze(-1) - x.sum(-1)).square().mean()


def plain_run(kind: str, *, max_norm: float | None = None, steps: int = STEPS) -> tuple[nn.Module, Optimizer]:
    model, optimizer = made(kind)
    for step in range(steps):
        squared(model, batch(step, dist.get_rank())).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def guarded_run(
    kind: str, *, bad: Callable[[int, int, Tensor], Tensor] | None = None, steps: int = STEPS, **settings: Any
) -> tuple[nn.Module, Optimizer, list[steadystep.Outcome], steadystep.Guard]:
    """`bad(step, rank, x)` changes the batch of one rank."""
    model, optimizer = made(kind)
    guard = steadystep.Guard(model, optimizer, **settings)
    rank, outcomes = dist.get_rank(), []
    for step in range(steps):
        x = batch(step, rank)
        x = x if bad is None else bad(step, rank, x)
        outcomes.append(guard.step(lambda x: squared(model, x), batch=x))
    return model, optimizer, outcomes, guard


def tensors_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """What this rank holds: local parts of weights, buffers and moments."""
    found = {f"model.{k}": local_part(v).detach().clone() for k, v in model.state_dict().items()}
    for number, slots in optimizer.state_dict()["state"].items():
        found |= {f"optimizer.{number}.{k}": local_part(torch.as_tensor(v)).clone() for k, v in slots.items()}
    return found


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), f"{name} differs by {(value - right[name]).abs().max()}"


def everywhere(thing: Any) -> list[Any]:
    """What each rank holds."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, thing)
    return found


def assert_replicas(model: nn.Module, optimizer: Optimizer) -> None:
    """Bit-identical on all ranks, buffers apart: DDP makes those equal when the next forward pass begins."""
    digest = hashlib.sha256()
    for name, tensor in tensors_of(model, optimizer).items():
        if "running" not in name and "num_batches" not in name:
            digest.update(tensor.numpy().tobytes())
    found = everywhere(digest.hexdigest())
    assert len(set(found)) == 1, found


def assert_finite(model: nn.Module, optimizer: Optimizer) -> None:
    for name, tensor in tensors_of(model, optimizer).items():
        assert not tensor.is_floating_point() or bool(tensor.isfinite().all()), name


def decisions(outcomes: list[steadystep.Outcome]) -> list[tuple[object, ...]]:
    """Everything that was decided, and what it was decided from; what a rank knows of its own batch is its own."""
    own = {"outputs": None, "batch": None, "initial": None}
    seen = [None if o.signals is None else replace(o.signals, **own) for o in outcomes]
    return [
        (o.step, o.stepped, o.plan, o.diagnosis.cause, repr(s), o.origin, o.restored, o.replayed, o.exact)
        for o, s in zip(outcomes, seen, strict=True)
    ]


def assert_one_decision(outcomes: list[steadystep.Outcome]) -> None:
    found = everywhere(decisions(outcomes))
    for rank, other in enumerate(found):
        for mine, theirs in zip(found[0], other, strict=True):
            assert repr(mine) == repr(theirs), f"rank {rank}: {theirs}\nrank 0: {mine}"


def nan_on(bad_rank: int, *steps: int) -> Callable[[int, int, Tensor], Tensor]:
    return lambda step, rank, x: x * math.nan if rank == bad_rank and step in steps else x


def run(checks: dict[str, Callable[[], None]]) -> None:
    """Each check on all ranks; the first failure ends them all."""
    start()
    try:
        for name, check in checks.items():
            check()
            if dist.get_rank() == 0:
                os.write(1, f"{name}: ok\n".encode())
    finally:
        dist.destroy_process_group()
