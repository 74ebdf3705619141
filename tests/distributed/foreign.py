"""Run by torchrun on two ranks: engines that a guard cannot work with, refused alike on both, without a hang."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import steadystep
from tests.distributed.setting import batch, network, run, squared


def refused(said: str, attempt: Callable[[], object]) -> None:
    with pytest.raises(steadystep.SteadystepError) as error:
        attempt()
    assert said in str(error.value), error.value


def fsdp1() -> None:
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for attach in (steadystep.Guard, steadystep.watch):
        refused("use torch.distributed.fsdp.fully_shard (FSDP2)", lambda attach=attach: attach(model, optimizer))


def join(attach_first: bool) -> None:
    """Rank 1 has one batch less. Refused at attach inside join(), else in the first step, on both ranks."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rank = dist.get_rank()

    def loop() -> None:
        guard = steadystep.Guard(model, optimizer) if attach_first else None
        with model.join():
            guard = guard or steadystep.Guard(model, optimizer)
            for step in range(4 - rank):
                x = batch(step, rank)
                guard.step(lambda x=x: squared(model, x))

    refused("remove join()", loop)


def late_pipeline(names: bool) -> None:
    """A guard that was made before the stages: the error says so, by the names or at the first step."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    module = nn.Sequential()
    module.add_module(f"stage{rank}" if names else "stage", nn.Linear(6, 6))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    if names:
        refused("create its PipelineStage before the guard", lambda: steadystep.watch(module, optimizer))
        return
    watcher = steadystep.watch(module, optimizer)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, t: (y - t).square().mean())
    x: Tensor = torch.ones(4, 6)
    schedule.step(x) if rank == 0 else schedule.step(target=x)
    refused("create its PipelineStage before the guard", optimizer.step)
    watcher.remove()


ALL: dict[str, Callable[[], None]] = {
    "fsdp1": fsdp1,
    "join": lambda: join(attach_first=True),
    "join first": lambda: join(attach_first=False),
    "late pipeline": lambda: late_pipeline(names=False),
    "late pipeline by names": lambda: late_pipeline(names=True),
}

if __name__ == "__main__":
    run(ALL)
