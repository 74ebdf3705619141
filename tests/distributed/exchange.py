"""A guard's state in a checkpoint of torch's own (DCP), and checkpoints of ours, read by fewer ranks. Forks its ranks.

Arguments: a folder. FSDP2 on 4 ranks saves, 2 ranks and then 1 load it and train on, all to the same weights.
"""

import copy
import json
import math
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import steadystep
from steadystep._utils.tensors import local_part
from tests.distributed.forked import fork

BEFORE, AFTER = 14, 2


def made() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 15), nn.Tanh(), nn.Linear(15, 1))  # 15 and 1 are split unevenly
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(guard: steadystep.Guard, model: nn.Module, steps: range) -> list[steadystep.Outcome]:
    """The same batch on every rank: the gradient does not depend on how many there are, up to rounding."""
    outcomes = []
    for step in steps:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        outcomes.append(guard.step(lambda x: (model(x).squeeze(-1) - x.sum(-1)).square().mean(), batch=x))
    return outcomes


def whole(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    held = {f"model.{name}": p for name, p in model.named_parameters()}
    for i, p in enumerate(model.parameters()):
        held |= {f"{i}.{key}": value for key, value in optimizer.state[p].items()}
    full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in held.items()}
    return {name: tensor.detach().clone() for name, tensor in full.items()}


def theirs(model: nn.Module, optimizer: Optimizer, guard: steadystep.Guard) -> dict[str, Any]:
    """What a program with DCP saves: its own state, and the guard's as one text."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "guard": json.dumps(guard.state_dict())}


class Later:
    """An asynchronous stager (torch's own needs CUDA): copies the state in a thread of its own, after half a second."""

    should_synchronize_after_execute = False

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
        def copied() -> dict[str, Any]:
            time.sleep(0.5)
            return copy.deepcopy(state_dict)

        return self._thread.submit(copied)

    def close(self) -> None:
        self._thread.shutdown()


@torch.no_grad()
def damage(model: nn.Module) -> None:
    local_part(next(iter(model.parameters()))).view(-1)[:1] = math.nan


def save(folder: Path) -> None:
    model, optimizer = made()
    with steadystep.Guard(model, optimizer, config={"recovery": {"trust_steps": 4}}) as guard:
        train(guard, model, range(BEFORE))
        state = theirs(model, optimizer, guard)
        dcp.save(state, checkpoint_id=folder / "dcp")
        guard.save(folder / "ours")
        expected = whole(model, optimizer)
        # an asynchronous save whose weights are rolled back right after it has returned
        own = dist.new_group(backend="gloo")  # its thread sends messages while the training sends others
        writing = dcp.async_save(state, checkpoint_id=folder / "async", process_group=own)
        damage(model)
        back = train(guard, model, range(BEFORE, BEFORE + 1))[0]
        assert back.restored is not None, back
        writing.result()
        # one whose weights, damaged ones, are still being copied when the step rolls back
        damage(model)
        staged = dcp.async_save(
            theirs(model, optimizer, guard), checkpoint_id=folder / "staged", process_group=own, async_stager=Later()
        )
        at_save = whole(model, optimizer)
        guard.wait_for(staged)
        (back,) = train(guard, model, range(BEFORE + 1, BEFORE + AFTER))
        assert back.restored is not None, back
        staged.upload_completion.result()
    if dist.get_rank() == 0:
        torch.save(expected, folder / "expected.pt")
        torch.save(at_save, folder / "staged.pt")


def load(folder: Path) -> None:
    """By any number of ranks: weights, moments and the guard's state are those that were saved."""
    expected, at_save = torch.load(folder / "expected.pt"), torch.load(folder / "staged.pt")
    for kind in ("dcp", "async", "staged"):
        model, optimizer = made()
        with steadystep.Guard(model, optimizer) as guard:
            state = theirs(model, optimizer, guard)
            dcp.load(state, checkpoint_id=folder / kind)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            guard.load_state_dict(json.loads(state["guard"]))
            assert guard.attempts == BEFORE + (kind == "staged")
            same(at_save if kind == "staged" else expected, whole(model, optimizer), kind)
            outcomes = [] if kind == "staged" else train(guard, model, range(BEFORE, BEFORE + AFTER))
            assert all(o.stepped for o in outcomes)
    model, optimizer = made()
    run = folder / f"run-{dist.get_world_size()}"
    with steadystep.Guard.resume(model, optimizer, path=folder / "ours", run_dir=run) as guard:
        assert guard.updates == BEFORE
        same(expected, whole(model, optimizer), "ours")


def same(left: dict[str, Tensor], right: dict[str, Tensor], kind: str) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value.nan_to_num(nan=9.0), right[name].nan_to_num(nan=9.0)), (kind, name)


def main(folder: Path) -> int:
    failed = fork(4, lambda rank: save(folder))
    for size in (2, 1):
        failed = failed or fork(size, lambda rank: load(folder))
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
