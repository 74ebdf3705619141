"""What every engine has to show, on real ranks: healthy, NaN on each rank in turn, a damaged weight.

An engine's file has a function that trains a small model in one mode, guarded or not; the checks compare what it ends
with. Run by torchrun: `main.py ENGINE CHECK...`.
"""

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

import steadystep
from steadystep._utils.tensors import local_part
from tests.distributed.setting import assert_one_decision, assert_same, everywhere

STEPS = 8
BAD = 4
"""The step whose batch holds a NaN on one rank."""
DAMAGE = 30
"""The step before which one weight becomes NaN; by then there is a trusted snapshot."""
LONG = 34
NORMS = 1e-5
"""How far the norm of the guard may be from the engine's, which is rounded to fp32."""


FOLDERS: list[Path] = []
"""Of guarded runs, the newest last."""


@dataclass
class Ran:
    """How a run ended, on this rank."""

    tensors: dict[str, Tensor]
    """Local parts of weights, buffers and moments."""
    outcomes: list[steadystep.Outcome] = field(default_factory=list)
    applied: list[bool] = field(default_factory=list)
    """By the engine's own account: whether each update was applied."""
    losses: list[float] = field(default_factory=list)
    """Of this rank and each step, mean over its micro-batches, computed in the loop."""
    norms: list[float] = field(default_factory=list)
    """Of the whole gradient of each step, as the engine has it."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What happens in a run."""

    guarded: bool = False
    steps: int = STEPS
    bad_rank: int | None = None
    """Its batch of step BAD holds a NaN."""
    without: int | None = None
    """A step that no rank takes."""
    damage: bool = False
    """A weight of the last rank becomes NaN before step DAMAGE."""

    def batch(self, step: int, rank: int, *, bad: bool = True) -> Tensor:
        """Of one step and rank; without the NaN, if it is not the micro-batch to be `bad`."""
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * step + rank))
        return x * math.nan if bad and step == BAD and rank == self.bad_rank else x

    def folder(self) -> Path:
        """A new one, the same on all ranks, for the run log and the incidents."""
        made = [tempfile.mkdtemp(prefix="steadystep-engines-") if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(made)
        FOLDERS.append(Path(made[0]))
        return FOLDERS[-1]

    def todo(self) -> list[int]:
        return [step for step in range(self.steps) if step != self.without]

    def breaks(self, step: int) -> bool:
        return self.damage and step == DAMAGE and dist.get_rank() == dist.get_world_size() - 1


class Engine(Protocol):
    """Trains by a plan in one mode."""

    def __call__(self, mode: str, plan: Plan) -> Ran: ...


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).squeeze(-1) - torch.nan_to_num(x).sum(-1)).square().mean()


@torch.no_grad()
def damage(model: nn.Module) -> None:
    """The first weight that this rank holds becomes NaN."""
    local = next(part for part in map(local_part, model.parameters()) if part.numel())
    local.view(-1)[0] = math.nan


def assert_finite(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        assert not tensor.is_floating_point() or bool(tensor.isfinite().all()), name


def healthy(engine: Engine, mode: str) -> None:
    """With no incident, the bits of the same engine without us; every step applied, no action."""
    plain, guarded = engine(mode, Plan()), engine(mode, Plan(guarded=True))
    assert_same(plain.tensors, guarded.tensors)
    assert len(guarded.outcomes) == STEPS
    assert all(o.stepped and not o.plan.actions and math.isfinite(o.loss) for o in guarded.outcomes), guarded.outcomes
    assert all(guarded.applied)
    means = [sum(each) / len(each) for each in zip(*everywhere(guarded.losses), strict=True)]
    seen = [o.loss for o in guarded.outcomes]
    assert all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(seen, means, strict=True)), (seen, means)
    norms = [o.signals.grad_norm for o in guarded.outcomes if o.signals is not None]
    theirs = guarded.norms or norms  # an engine may have none
    assert all(math.isclose(a, b, rel_tol=NORMS) for a, b in zip(norms, theirs, strict=True)), (norms, theirs)
    assert_one_decision(guarded.outcomes)


def nan(engine: Engine, mode: str) -> None:
    """On each rank in turn: refused by all, and the weights are those of a run without that step."""
    without = engine(mode, Plan(without=BAD))
    for rank in range(dist.get_world_size()):
        ran = engine(mode, Plan(guarded=True, bad_rank=rank))
        stepped = [o.stepped for o in ran.outcomes]
        assert stepped == [step != BAD for step in range(STEPS)], (rank, stepped)
        assert ran.applied in ([], stepped), (ran.applied, stepped)
        assert_one_decision(ran.outcomes)
        assert_finite(ran.tensors)
        assert_same(without.tensors, ran.tensors)
        assert_written("non-finite")


def poisoned(engine: Engine, mode: str) -> None:
    """Without us the same NaN ruins the weights: the other checks can fail."""
    ran = engine(mode, Plan(bad_rank=dist.get_world_size() - 1))
    assert not all(bool(t.isfinite().all()) for t in ran.tensors.values() if t.is_floating_point())


def rollback(engine: Engine, mode: str) -> None:
    """A weight of one rank becomes NaN: all ranks go back to the same state, and train on."""
    ran = engine(mode, Plan(guarded=True, damage=True, steps=LONG))
    restored = [o.step for o in ran.outcomes if o.restored is not None]
    assert restored in ([DAMAGE], [DAMAGE + 1]), restored  # the second: damage that the model sees after one update
    assert_one_decision(ran.outcomes)
    assert_finite(ran.tensors)
    assert all(o.stepped for o in ran.outcomes if o.step not in restored)
    assert ran.applied in ([], [o.stepped for o in ran.outcomes], [True] * LONG), ran.applied
    assert_written("rollback")


def replayed(engine: Engine, mode: str) -> None:
    """The updates since are replayed: to the bits of what they were, with accumulation up to rounding."""
    ran = engine(mode, Plan(guarded=True, damage=True, steps=LONG))
    back = next(o for o in ran.outcomes if o.restored is not None)
    assert (back.restored, back.exact) == (DAMAGE + 1, not mode.endswith("accumulate")), back
    if back.exact:
        whole = engine(mode, Plan(guarded=True, steps=LONG))
        assert_same(whole.tensors, ran.tensors)


def assert_written(word: str) -> None:
    """The run log names it, and there is one bundle: by rank 0 alone, or the rank where it began."""
    dist.barrier()
    if dist.get_rank() == 0:
        folder = FOLDERS[-1]
        log = next(folder.rglob("run.jsonl"))
        assert word in log.read_text(), log.read_text()[-2000:]
        assert len(list(folder.rglob("incident.json"))) == 1, list(folder.rglob("*"))
    dist.barrier()


CHECKS: dict[str, Callable[[Engine, str], None]] = {
    "healthy": healthy,
    "nan": nan,
    "poisoned": poisoned,
    "rollback": rollback,
    "replayed": replayed,
}


def start() -> None:
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))


def run(engine: Engine, modes: Sequence[str], checks: Sequence[str]) -> None:
    """Each check of each mode on all ranks; the first failure ends them all."""
    for mode in modes:
        for name in checks:
            CHECKS[name](engine, mode)
            while FOLDERS:
                shutil.rmtree(FOLDERS.pop(), ignore_errors=True)
            assert set(everywhere(name)) == {name}
            if dist.get_rank() == 0:
                os.write(1, f"{mode}: {name}: ok\n".encode())
