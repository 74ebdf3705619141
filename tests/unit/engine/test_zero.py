"""`ZeroRedundancyOptimizer`: its moments are in another optimizer inside it."""

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import steadystep
from steadystep.records import Outcome
from tests.loops import batches, small_net, squared

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.jit.script
    from torch.distributed.optim import ZeroRedundancyOptimizer


@pytest.fixture(autouse=True)
def _one_process(tmp_path: Path) -> Iterator[None]:
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def run(
    steps: slice = slice(66), *, damaged: bool = False, resume: bool = False, **settings: Any
) -> tuple[list[Tensor], list[Outcome]]:
    model: nn.Module = small_net(dropout=0.0)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=AdamW, lr=0.01)
    guard = (steadystep.Guard.resume if resume else steadystep.Guard)(model, optimizer, **settings)
    outcomes = []
    for step, x in list(enumerate(batches(66)))[steps]:
        if damaged and step == 52:
            with torch.no_grad():
                model[-1].weight[0, 0] = math.nan
        outcomes.append(guard.step(lambda x: squared(model, x), batch=x))
    guard.close()
    slots = [optimizer.optim.state[parameter] for parameter in model.parameters()]
    held = [each[name] for each in slots for name in ("exp_avg", "exp_avg_sq", "step")]
    return [tensor.detach().clone() for tensor in (*model.state_dict().values(), *held)], outcomes


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def test_replay_is_exact_and_an_incident_is_written(tmp_path: Path) -> None:
    whole, _ = run()
    mended, outcomes = run(damaged=True, run_dir=tmp_path / "run")
    (back,) = [outcome for outcome in outcomes if outcome.restored is not None]
    assert back.exact
    assert same(mended, whole)
    assert back.incident


def test_a_run_that_was_saved_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    settings = {"run_dir": tmp_path / "run", "config": {"monitoring": {"save_checkpoints": True}}}
    run(slice(20), **settings)
    resumed, _ = run(slice(20, 66), resume=True, **settings)
    assert same(resumed, run()[0])
