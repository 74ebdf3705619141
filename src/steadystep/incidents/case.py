"""An incident between being noticed and being dealt with: the weights are still those the step started from."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from steadystep.accumulation.recipe import Closure
from steadystep.buffers import Buffers
from steadystep.incidents import verdict
from steadystep.incidents.bundle import Draft
from steadystep.incidents.locate import examine
from steadystep.incidents.origin import Examination, Origin
from steadystep.incidents.step_state import device_of
from steadystep.precision import Precision
from steadystep.rng import RngState, random_numbers_kept


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What the second look found, and the bundle that is being written about it (None: it could not be)."""

    examination: Examination
    precision: str
    draft: Draft | None = None
    rank: int = 0
    """Where it began."""
    said: str | None = None
    """What that rank has to say about it; None in a run of one process."""


@contextmanager
def as_before(buffers: Buffers | None) -> Iterator[None]:
    """Buffers as they were before the forward pass; afterwards as they are now."""
    if buffers is None:
        yield
        return
    with buffers.untouched():
        buffers.put_back()
        yield


def second_look(
    model: nn.Module,
    work: Closure | None,
    batch: Any,
    *,
    rng: RngState | None = None,
    precision: Precision | None = None,
    scale: float = 1.0,
    forward_only: bool = False,
) -> Examination:
    """Run a step again under hooks; whatever the user's code raises becomes part of the answer."""
    if work is None:
        origin = verdict.of_weights(model, verdict.sick_weights(model))
        return Examination(origin=origin or Origin(what="a loss given as a tensor cannot be run again"))

    def run() -> Any:
        with nullcontext() if precision is None else precision.autocast():
            return work() if batch is None else work(batch)

    with random_numbers_kept(device_of(model)):
        if rng is not None:
            rng.restore()
        try:
            return examine(model, run, batch=batch, scale=scale, parameters=() if forward_only else None)
        except Exception as error:
            return Examination(origin=Origin(what=f"it could not be run again: {type(error).__name__}: {error}"))
