"""What a judge says about a step: a verdict, or which further measurement it needs before it can say."""

import math
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, final

from steadystep.diagnosis.explain import advised, explain
from steadystep.diagnosis.facts import Setup
from steadystep.policy import Budget, Limits, Mode, decide, has_broken_weights
from steadystep.policy.trusted_snapshots import TrustedSnapshot
from steadystep.records import Action, Counterfactual, DetectorName, Diagnosis, Finding, Plan, Signals

_PLANNED = 1.1  # times the learning rate of a state: with that much more by plan, the loss is meant to be higher
USUAL = 20
"""Batches before a repetition that it is compared with."""
_UNUSUAL = 2.0  # times the mean of their losses
_UNKNOWN = Setup()
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


def conclude(
    signals: Signals,
    found: tuple[Finding, ...],
    *,
    budget: Budget,
    limits: Limits,
    states: Sequence[TrustedSnapshot],
    mode: Mode = "autopilot",
    ceiling: float | None = None,
    setup: Setup = _UNKNOWN,
) -> Verdict:
    """Explain what was found and decide about it: for a step that is under way, or one in yesterday's log."""
    diagnosis = explain(signals, found, setup)
    budget.see(diagnosis)
    plan = decide(signals, diagnosis, budget=budget, mode=mode, states=states, limits=limits, ceiling=ceiling)
    return Verdict(signals, advised(diagnosis, signals, plan, setup), plan)


Question = Literal[
    "weight-norms",
    "norm-now",
    "states",
    "finite-states",
    "losses",
    "remembered-losses",
    "repeats",
    "scores",
    "pin",
    "gradients",
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
    weights and under `states`, with seeds from `count` on; "pin" keeps a state for as long as it is the best;
    "gradients" what the norms of the first batch since a state (of `states`, or the newest) are divided by those it
    gave: 1 if they are the same, NaN if they differ by no common factor; those since step `count` were held down. None
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


_NO_UPDATE = frozenset((Action.SKIP_STEP, Action.LEAVE_OUT, Action.BACK_OFF_SCALE, Action.ROLLBACK))
_LARGER = 2.0  # times: less is no fault
_SAME_FACTOR = 0.05
_CHECKED_EVERY, _LEFT_FOR, _WAITS_EVERY, _WAITS_FOR = 16, 500, 8, 64  # steps


@final
class BackwardCheck:
    """Whether backward still gives what it gave: a remembered batch is run again under the weights of then.

    Gradients that are all too large by one factor are divided by it, for as long as they are; for 16 steps where the
    optimizer has second moments, which follow a lasting factor by themselves. Where they differ
    otherwise, something is wrong with backward at this very step: a rollback waits for its end, for at most 64 steps,
    because nothing can be replayed until then.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        """Of all gradients now, beside those that the same batches gave before."""
        self.due = math.inf
        """The step at which a rollback that waits is tried again; a number, because every step asks for it."""
        self._since = self._next = 0
        self._usual = 0.0
        """The last norm, divided."""
        self._normalizes = False
        self._left_until = 0
        """No factor is asked for before this step."""
        self._waiting: tuple[Finding, ...] = ()
        self._waits_until = 0

    def explain(
        self, signals: Signals, found: tuple[Finding, ...], states: Sequence[State]
    ) -> Generator[Ask, Any, tuple[Finding, ...]]:
        """A spike of all gradients by one factor: it is known exactly, and divided out."""
        spike = next((f for f in found if f.detector == DetectorName.GRADIENT_SPIKE and f.severity == "act"), None)
        if spike is None or self.factor != 1.0 or signals.step < self._left_until:
            return found
        factor = yield Ask("gradients")
        if factor is None or not _LARGER <= factor < math.inf:
            return found
        self.factor, self._since, self._next = factor, signals.step, signals.step + _CHECKED_EVERY
        self._usual = signals.grad_norm / factor
        self._normalizes = any(state.second_moment is not None for state in states[-1:])
        what = f"all gradients are {factor:.4g} times what the same batch gave with the same weights"
        exact = replace(spike, limit=signals.grad_norm, baseline=self._usual, what=what)
        return tuple(exact if finding is spike else finding for finding in found)

    def check(self, signals: Signals) -> Generator[Ask, Any, Signals]:
        """The signals as they would be without the factor; whether it still holds is measured now and then."""
        norm = signals.grad_norm / self.factor
        gone = norm * math.sqrt(self.factor) < self._usual
        if gone or signals.step >= self._next:
            self._next = signals.step + _CHECKED_EVERY
            factor = yield Ask("gradients", count=self._since)
            lasts = factor is not None and _LARGER <= factor < math.inf
            if lasts and self._normalizes:  # it takes a lasting factor out by itself
                self._left_until, lasts = signals.step + _LEFT_FOR, False
            self.factor = factor if lasts else 1.0
        divided = replace(
            signals,
            grad_norm=signals.grad_norm / self.factor,
            norms=tuple(each / self.factor for each in signals.norms),
        )
        if divided.all_finite:
            self._usual = divided.grad_norm
        return signals if self.factor == 1.0 else divided

    def divided(self, signals: Signals, verdict: Verdict) -> Verdict:
        """The verdict about divided gradients as one about those that are there."""
        seen = replace(verdict.signals, grad_norm=signals.grad_norm, norms=signals.norms)
        plan, diagnosis = verdict.plan, verdict.diagnosis
        if self.factor == 1.0 or not _NO_UPDATE.isdisjoint(plan.actions) or not signals.all_finite:
            return replace(verdict, signals=seen)
        if plan.norm is None:
            plan = replace(plan, actions=(*plan.actions, Action.RESCALE), norm=signals.grad_norm / self.factor)
        if not diagnosis.findings:
            what = f"all gradients are still {self.factor:.4g} times what the same batch gave with the same weights"
            spike, norm = DetectorName.GRADIENT_SPIKE, signals.grad_norm
            note = Finding(detector=spike, step=signals.step, severity="info", value=norm, limit=norm, what=what)
            diagnosis = explain(seen, (note,))
        return Verdict(seen, diagnosis, replace(plan, reason=plan.reason or diagnosis.cause))

    def pending(self, step: int) -> tuple[Finding, ...]:
        """What a rollback waits for, as found at this step."""
        return tuple(replace(finding, step=step) for finding in self._waiting) if step >= self.due else ()

    def wait(self, signals: Signals, verdict: Verdict, states: Sequence[State]) -> Generator[Ask, Any, Verdict]:
        """The verdict, or one that leaves things as they are while nothing could be replayed."""
        plan, step = verdict.plan, signals.step
        until = self._waits_until if self._waiting else step + _WAITS_FOR
        if Action.ROLLBACK not in plan.actions and step < self.due:
            return verdict
        self.due, self._waiting = math.inf, ()
        state = next((state for state in states if state.step == plan.to), None)
        certain = plan.until is None or plan.or_nothing or has_broken_weights(verdict.diagnosis.findings)
        if certain or state is None or step >= until or not signals.all_finite:
            return verdict
        factor = yield Ask("gradients", states=[state])
        if factor is None or abs(factor - 1.0) <= _SAME_FACTOR:
            return verdict
        self._waits_until, self.due = until, step + _WAITS_EVERY
        self._waiting = tuple(f for f in verdict.diagnosis.findings if f.severity == "act")
        return replace(verdict, plan=_PROCEED)
