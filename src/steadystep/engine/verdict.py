"""What a judge says about a step: a verdict, or which further measurement it needs before it can say."""

import math
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, final

from steadystep.policy.trusted_snapshots import TrustedSnapshot
from steadystep.records import Counterfactual, DetectorName, Diagnosis, Finding, Plan, Signals

_PLANNED = 1.1  # times the learning rate of a state: with that much more by plan, the loss is meant to be higher
USUAL = 20
"""Batches before a repetition that it is compared with."""
_UNUSUAL = 2.0  # times the mean of their losses
_NOTHING_FOUND, _PROCEED = Diagnosis(), Plan()  # what nearly every step comes to; made once


class State(TrustedSnapshot, Protocol):
    """What the judge needs to know of a state that a rollback could restore."""

    @property
    def updates(self) -> int:
        """Contained in its weights."""
        ...

    @property
    def largest_lr(self) -> float:
        """In use until then."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong with a step, and what to do about it."""

    signals: Signals
    """As measured, and with what was measured since."""
    diagnosis: Diagnosis = _NOTHING_FOUND
    plan: Plan = _PROCEED


Question = Literal[
    "weight-norms", "norm-now", "states", "finite-states", "losses", "remembered-losses", "repeats", "scores", "pin"
]


@final
@dataclass(frozen=True, slots=True)
class Ask:
    """One further measurement: `what`, and of which states.

    "states" and "finite-states" (without NaN and infinity) list what a rollback could restore, oldest first, with the
    multiplier of the last update's learning rate. "weight-norms" adds them to the signals. "norm-now" is the gradient
    norm after the loop's own clipping. "losses" are those of the batch at hand, under the present weights and then
    under `states`; "remembered-losses" the pairs of old and current loss of up to `count` remembered batches; "repeats"
    whether the first batch since a state still has the loss it had; "scores" what rollouts earn under the present
    weights and under `states`, with seeds from `count` on; "pin" keeps a state for as long as it is the best. None
    where it cannot be told.
    """

    what: Question
    states: Sequence[State] = ()
    count: int = 0
    backward: bool = False
    rollouts: int = 8


@final
class Needs:
    """The judge cannot tell yet: measure `ask`, and go on with `answer`."""

    __slots__ = ("_rest", "ask")

    def __init__(self, rest: Generator[Ask, Any, Verdict], ask: Ask) -> None:
        self._rest, self.ask = rest, ask

    def answer(self, measured: Any) -> "Verdict | Needs":
        """Go on with what was measured."""
        return go_on(self._rest, measured)


def go_on(rest: Generator[Ask, Any, Verdict], measured: Any = None) -> Verdict | Needs:
    """Run a deliberation up to its next question, or to its end."""
    try:
        return Needs(rest, rest.send(measured))
    except StopIteration as end:
        verdict: Verdict = end.value
        return verdict


def settle(verdict: Verdict | Needs, measure: Callable[[Ask], Any]) -> Verdict:
    """Measure whatever the judge asks for, until it has decided."""
    while isinstance(verdict, Needs):
        verdict = verdict.answer(measure(verdict.ask))
    return verdict


def newest_finite(states: Sequence[State], losses: Sequence[float]) -> Counterfactual:
    """The newest of these states under which the batch is finite; `losses` begin with that of the present weights."""
    current, *old = losses
    tried = [
        Counterfactual(step=state.step, old_loss=loss, current_loss=current, lr=state.lr)
        for state, loss in zip(states, old, strict=True)
    ]
    finite = [each for each in tried if math.isfinite(each.old_loss)]
    return finite[-1] if finite else tried[-1]


def stand_out(losses: Sequence[float], count: int) -> bool:
    """Whether the last `count` losses, of one batch again and again, are far above all of those before."""
    usual, repeated = losses[:-count], losses[1 - count :]  # the first of them may be the one that was repeated
    if len(usual) < USUAL // 2 or not min(usual) > 0.0:
        return False
    return min(repeated) > max(usual) and sum(repeated) / len(repeated) > _UNUSUAL * sum(usual) / len(usual)


def by_plan(state: State, lr: float, announced: float) -> bool:
    """The learning rate has risen a good deal since, to where it has been before or was announced to go."""
    known = max(state.largest_lr, announced)
    return state.lr * _PLANNED < lr <= known * 1.001


def held_back(found: tuple[Finding, ...]) -> Generator[Ask, Any, tuple[Finding, ...]]:
    """A spike that the loop's own clipping has brought under the limit is a note."""
    spike = next((f for f in found if f.detector == DetectorName.GRADIENT_SPIKE and f.severity == "act"), None)
    if spike is None or not (yield Ask("norm-now")) <= spike.limit:
        return found
    note = replace(spike, severity="info", what=f"{spike.what}, limited by your clipping")
    return tuple(note if finding is spike else finding for finding in found)


@final
class Turns:
    """Whether guards of one process take turns: a generator and its critic, an actor and its critic.

    The loss of each then depends on the other, and its level says little by itself.
    """

    _ENOUGH, _MOST, _EACH = 16, 64, 8
    last: ClassVar["weakref.ref[Turns] | None"] = None
    """Whose turn it was."""

    def __init__(self) -> None:
        self.mark = weakref.ref(self)
        self.count = 0
        self.are_taken = False
        """Another guard has stepped between the steps of this one, again and again."""

    def take(self) -> None:
        """This guard looks at a step; does nothing where `last` is its `mark` and `count` is 0."""
        last = None if Turns.last is None else Turns.last()
        if last is self:
            self.count -= self.count > 0
        else:
            Turns.last = self.mark
            if last is not None:
                self.count = min(self.count + self._EACH, self._MOST)
        self.are_taken = self.count >= self._ENOUGH
