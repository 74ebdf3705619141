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
from steadystep.incidents.locate import Agree, examine
from steadystep.incidents.origin import Examination, Origin
from steadystep.incidents.step_state import device_of
from steadystep.precision import Precision
from steadystep.rng import RngState, random_numbers_kept

_NO_FUNCTION = (
    "it cannot be run again without a function that computes this loss: guard.step(function), or "
    "watcher.loss(loss, again=function)"
)


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
        buffers.put_back(outside=False)
        yield


def second_look(
    model: nn.Module,
    work: Closure | None,
    batch: Any,
    *,
    rng: RngState | None = None,
    precision: Precision | None = None,
    scale: float = 1.0,
    agree: Agree | None = None,
) -> Examination:
    """Run a step again under hooks; whatever the user's code raises becomes part of the answer.

    With `agree` all ranks do so together: see `examine`.
    """
    if work is None:
        origin = verdict.of_weights(model, verdict.sick_weights(model))
        return Examination(origin=origin or Origin(what=_NO_FUNCTION))

    def run() -> Any:
        with nullcontext() if precision is None else precision.autocast():
            return work() if batch is None else work(batch)

    asked = False

    def all_agree(flag: bool) -> bool:
        nonlocal asked
        asked = True
        return agree is None or agree(flag)

    with random_numbers_kept(device_of(model)):
        if rng is not None:
            rng.restore()
        try:
            return examine(model, run, batch=batch, scale=scale, agree=None if agree is None else all_agree)
        except Exception as error:
            if agree is not None and not asked:
                agree(False)  # the others wait for an answer
            return Examination(origin=Origin(what=f"it could not be run again: {type(error).__name__}: {error}"))
