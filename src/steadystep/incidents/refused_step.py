"""An incident between being noticed and being dealt with: the weights are still those the step started from."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from torch import nn

from steadystep._utils.rng import RngState, random_numbers_kept
from steadystep.incidents.bundle import Draft
from steadystep.incidents.locate import AgreeOnBad, examine
from steadystep.incidents.origin import Examination, Origin, of_weights, sick_weights
from steadystep.incidents.step_state import device_of
from steadystep.parallel import Ranks
from steadystep.precision import Precision
from steadystep.records import Outcome, Signals
from steadystep.snapshots.buffers import Buffers

if TYPE_CHECKING:
    from steadystep.engine.closures import Closure

_NO_FUNCTION = (
    "it cannot be run again without a function that computes this loss: guard.step(function), or "
    "watcher.loss(loss, again=function)"
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedStep:
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
    work: "Closure | None",
    batch: Any,
    *,
    rng: RngState | None = None,
    precision: Precision | None = None,
    scale: float = 1.0,
    agree: AgreeOnBad | None = None,
) -> Examination:
    """Run a step again under hooks; whatever the user's code raises becomes part of the answer.

    With `agree` all ranks do so together: see `examine`.
    """
    if work is None:
        origin = of_weights(model, sick_weights(model))
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


_WITH_NORMS = 50  # newest steps that keep the norm of every tensor in the file; a large model has thousands


@final
class History:
    """A ring of outcomes. Adding one is an append to a deque; nothing is copied or formatted until it is written."""

    def __init__(self, length: int = 500) -> None:
        self._past: deque[Outcome] = deque(maxlen=length)

    def note(self, outcome: Outcome) -> None:
        """One more; the oldest is forgotten."""
        self._past.append(outcome)

    def __len__(self) -> int:
        return len(self._past)

    @property
    def last(self) -> Outcome | None:
        """The newest."""
        return self._past[-1] if self._past else None

    def lines(self) -> Iterator[str]:
        """One line of JSON each, oldest first: `Outcome.from_json` reads them."""
        old = len(self._past) - _WITH_NORMS
        for i, outcome in enumerate(self._past):
            signals = outcome.signals
            if i < old and signals is not None and signals.norms:
                outcome = replace(outcome, signals=replace(signals, names=(), norms=()))
            yield outcome.to_json()


_BAD, _FINE = "!", "."


def whose(ranks: Ranks, signals: Signals, found: Examination, said: str) -> tuple[int, str]:
    """The rank, and what it has to say: one whose own loss was bad, else one where it showed again, else the first.

    All ranks call it, each with what it found.
    """
    every = ranks.texts(f"{_FINE if found.finite else _BAD}{said}")
    again = [rank for rank, text in enumerate(every) if text.startswith(_BAD)]
    both = [rank for rank in again if rank in signals.bad_ranks]
    rank = next(iter([*both, *signals.bad_ranks, *again]), 0)
    text = every[rank][1:]
    known = bool(again or signals.bad_ranks)
    return rank, f"rank {rank}: {text}" if known and text else text
