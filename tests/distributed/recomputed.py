"""Run by torchrun on two ranks: a step is computed again by all of them, and the rank that went wrong is named."""

import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import steadystep
from steadystep.engine import miscomputation
from steadystep.errors import TrainingHalted, UnsupportedError
from steadystep.records import Outcome

miscomputation._TRUSTED = 2


def hit(model: nn.Module, computations: range, rank: int) -> None:
    """Flip a bit of a matmul on one rank in these computations, each time another one."""
    count = 0

    def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
        nonlocal count
        if dist.get_rank() == rank and count in computations:
            output.data.view(torch.int32)[0, count % 8] ^= 1 << 22
        count += 1

    model[3].register_forward_hook(hook)  # type: ignore[index]


def run(every: int, computations: range = range(0), *, views: bool = False, accumulate: int = 1) -> list[object]:
    """The weights at the end, and the outcomes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 8), nn.Linear(8, 1))
    hit(model, computations, rank=1)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)
    config = {"monitoring": {"recompute_every": every}, "training": {"gradient_accumulation_steps": accumulate}}
    folder = Path(os.environ["FOLDER"]) / f"run-{every}-{computations.start}-{views}-{accumulate}"
    guard = steadystep.Guard(wrapped, torch.optim.AdamW(model.parameters()), config=config, run_dir=folder)
    data, outcomes = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(8 * accumulate):
        x = torch.randn(8, 6, generator=data)
        outcomes.append(guard.step(lambda x=x: wrapped(x).square().mean()))
    guard.close()
    return [torch.cat([each.detach().flatten() for each in model.state_dict().values()]), outcomes]


def found(outcomes: list[Outcome]) -> Outcome:
    (one,) = [outcome for outcome in outcomes if outcome.findings]
    return one


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for more in ({}, {"views": True}, {"accumulate": 2}):
        plain, _ = run(0, **more)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            twice, outcomes = run(1, **more)
        assert torch.equal(plain, twice)
        assert not any(outcome.findings for outcome in outcomes)
    for views in (False, True):
        plain, _ = run(0, views=views)
        mended, outcomes = run(1, range(7, 8), views=views)
        assert torch.equal(plain, mended)
        (wrong,) = found(outcomes).signals.miscomputations
        assert (found(outcomes).step, wrong.rank, wrong.persistent) == (4, 1, False)
        assert "gradient of 0.weight" in wrong.tensors
    with pytest.raises(TrainingHalted) as halted:
        run(1, range(9, 99))
    assert halted.value.step == 5
    assert "rank 1 (" in halted.value.what
    assert "replay" in halted.value.did
    sharded = fully_shard(nn.Sequential(nn.Linear(4, 4)))
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match="FSDP2"):
        steadystep.Guard(sharded, optimizer, config={"monitoring": {"recompute_every": 1}})
    sys.stdout.write(f"rank {dist.get_rank()}: ok\n")
    dist.destroy_process_group()
