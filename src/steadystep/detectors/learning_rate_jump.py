"""A learning rate that nobody announced: more than ten times what was in use."""

import math
from typing import Any, final

from steadystep.records import Finding, Signals

_ARMED_AFTER = 32  # steps with a learning rate above zero: a warm-up multiplies it many times in its first steps
_WINDOW = 32  # steps; the recent rate is the largest of one to two windows
_BACK = (0.8, 1.1)  # times the largest used: a restart
_HARMLESS = 0.1  # times the largest used: the first step of a restart that warms up
_PROVEN = 1000  # steps after which a leap is a rate like any other
_HABIT = 3  # leaps withdrawn: it goes to and fro by plan


@final
class LearningRateJump:
    """Asks for action when the learning rate jumps, in one step, above `factor` times its largest of the last steps.

    A warmup that climbs far but gradually does not count. Nor does what a scheduler has announced, a return to 0.8 to
    1.1 times the largest rate used so far (a warm restart, a cycle), to where a restart led before, or to less than a
    tenth of the largest. What remains is a jump beyond all that was used, or to somewhere in between: late in a decay
    from 1e-3 to 1e-5, to 5e-4. Restarts set by hand to less than 0.8 of the peak look like that once; give them as a
    schedule.

    A jump that is withdrawn within 1,000 steps was never in use: the next one is reported again, the fourth no more.

    Args:
        factor: multiple of the largest recent rate.
    """

    name = "learning-rate-jump"

    def __init__(self, *, factor: float = 10.0) -> None:
        self._factor = factor
        self._last = 0.0
        self._largest = 0.0
        self._recent = [0.0, 0.0]
        """The largest of this window and of the one before."""
        self._restart = 0.0
        """The largest that a restart led to."""
        self._leap = 0.0
        """The rate that a leap led to, until it is withdrawn or proven; 0 when there is none."""
        self._seen = self._lasted = self._withdrawn = 0

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return a finding at the jump; from the next step on the new value is known."""
        lr = signals.lr
        if not 0.0 < lr < float("inf"):
            return ()  # a learning rate of 0 (before a warm-up, in between) is nothing to compare with
        if self._leap and not self._over(lr):
            return self._tell(signals, self._factor * self._leap) if lr > self._factor * self._leap else ()
        limit = self._factor * max(self._recent)
        if lr > limit and self._seen >= _ARMED_AFTER and lr > signals.announced_lr:
            if not self._returns(lr):
                return self._tell(signals, limit)
            self._restart = max(self._restart, lr)
        self._learn(lr)
        return ()

    def _over(self, lr: float) -> bool:
        """The leap was withdrawn, or has lasted long enough."""
        self._lasted += 1
        withdrawn = lr <= self._factor * max(self._recent)
        if not withdrawn and self._lasted < _PROVEN:
            return False
        self._withdrawn += withdrawn
        if not withdrawn or self._withdrawn >= _HABIT:
            self._largest = max(self._largest, self._leap)
            self._restart = max(self._restart, self._leap)
        self._leap = 0.0
        return True

    def _returns(self, lr: float) -> bool:
        least, most = _BACK
        known = least * self._largest <= lr <= most * self._largest
        return known or lr <= most * self._restart or lr < _HARMLESS * self._largest

    def _learn(self, lr: float) -> None:
        self._seen += 1
        if self._seen % _WINDOW == 0:
            self._recent = [lr, self._recent[0]]
        elif lr != self._last:
            self._recent[0] = max(self._recent[0], lr)
        self._last = lr
        self._largest = max(self._largest, lr)

    def _tell(self, signals: Signals, limit: float) -> tuple[Finding, ...]:
        self._leap, self._lasted = signals.lr, 0
        what = f"the learning rate jumped from {self._last:.3g} to {signals.lr:.3g}, and no schedule announced it"
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="act",
                value=signals.lr,
                limit=limit,
                baseline=self._last,
                what=what,
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "rates": [self._last, self._largest, self._restart, self._leap],
            "recent": list(self._recent),
            "counts": [self._seen, self._lasted, self._withdrawn],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._last, self._largest, self._restart, self._leap = (float(rate) for rate in state["rates"])
        self._recent = [float(rate) for rate in state["recent"]]
        self._seen, self._lasted, self._withdrawn = (int(count) for count in state["counts"])


_RESTED = 64  # steps without a rise; a warm-up rises all the time
_GRADUAL = 1.5  # a larger rise within one step is a decision, or a leap that another detector sees
_FALL = 0.5  # within one step: what follows may be another warm-up


@final
class LearningRateCreep:
    """Asks for action once when the learning rate has climbed, unannounced, to `factor` times its largest before.

    Typical causes: a `gamma` above 1, a schedule stepped with the wrong sign. Warmups never settled before or begin
    with a sudden fall, warm restarts return to an earlier rate, and torch's schedulers announce where they go: none of
    these counts.

    Args:
        factor: multiple of the largest rate before the climb.
    """

    name = "learning-rate-creep"

    def __init__(self, *, factor: float = 3.0) -> None:
        self._factor = factor
        self._last = 0.0
        self._largest = 0.0
        self._rested = 0
        self._before: float | None = None
        """The largest when the present climb began; None while there is none that began from rest."""
        self._since = 0

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return at most one finding for each climb."""
        lr, last = signals.lr, self._last
        if lr == last:
            self._rested += 1
            return ()
        if not 0.0 < lr < float("inf"):
            return ()
        self._last = lr
        if lr < last or lr > _GRADUAL * last:
            self._rested, self._before = self._rested + 1 if _FALL * last < lr < last else 0, None
            self._largest = max(self._largest, lr)
            return ()
        if self._rested >= _RESTED:
            self._before, self._since = self._largest, signals.step
        self._rested, self._largest = 0, max(self._largest, lr)
        before = self._before
        if before is None or lr <= self._factor * max(before, signals.announced_lr):
            return ()
        self._before = None
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="act",
                value=lr,
                limit=self._factor * before,
                baseline=before,
                since=self._since,
                what=f"the learning rate rose step by step from {before:.3g} to {lr:.3g}, and no schedule announced it",
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "rates": [self._last, self._largest, self._before],
            "steps": [self._rested, self._since],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        last, largest, before = state["rates"]
        self._last, self._largest = float(last), float(largest)
        self._before = None if before is None else float(before)
        self._rested, self._since = (int(value) for value in state["steps"])


_RISE = 1.5
# steps without a rise: a warm-up rises all the time, or by epochs
# in one step: what follows may be another warm-up
_LEAP = 2.5  # in one step, from rest; less is a decision, such as a warm-up by epochs
_RECENT = 100  # steps since the last rise in which a climb still counts


@final
class PlannedRise:
    """True once when the learning rate has risen 1.5 times from a low, to no more than was known before.

    Known is what it was before that low, and what a scheduler has announced.

    A warm restart makes the loss jump, and that was the plan: loss baselines then begin anew. A learning rate that
    creeps up beyond its old peak gets no such grace.

    >>> rise = PlannedRise()
    >>> [rise.update(lr) for lr in (1.0, 0.1, 0.9, 1.0, 2.0, 4.0)]
    [False, False, True, False, False, False]
    """

    __slots__ = ("_announced", "_before", "_largest", "_last", "_low", "_peak", "_rested")

    def __init__(self) -> None:
        self._low = math.inf
        self._peak = 0.0
        self._largest = 0.0
        self._announced = 0.0
        self._last = 0.0
        self._rested = 0
        self._before = math.inf
        """The largest when the present climb began; infinite in a warm-up, which is measured by nothing."""

    def update(self, lr: float, announced: float = 0.0) -> bool:
        """The learning rate of this step, and the largest one that was announced."""
        if lr == self._last:
            self._rested += 1
            return False
        if lr - lr != 0.0:
            return False
        self._follow(lr)
        if lr < self._low:
            self._low = lr
            self._peak = self._largest
        self._largest = max(self._largest, lr)
        self._announced = announced
        if self._low * _RISE < lr <= max(self._peak, announced) * 1.001:
            self._low = lr
            self._peak = self._largest
            return True
        return False

    def _follow(self, lr: float) -> None:
        """Where a climb begins."""
        last, self._last = self._last, lr
        if lr < last:
            self._rested += 1
            if lr <= _FALL * last:
                self._rested, self._before = 0, math.inf
            return
        if self._rested >= _RESTED:
            decided = _RISE * last < lr <= _LEAP * last
            self._before = math.inf if last <= 0.0 else max(self._largest, lr if decided else 0.0)
        self._rested = 0

    @property
    def climbing(self) -> bool:
        """An unannounced climb from rest, to 1.5 times what was known, is under way or ended within 100 steps.

        A rise from the first steps of a run on, or after a sudden fall, is a warm-up for as long as it lasts.
        """
        return self._rested <= _RECENT and self._largest > _RISE * max(self._before, self._announced)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        low, before = (None if value == math.inf else value for value in (self._low, self._before))
        return {
            "low": low,
            "before": before,
            "rates": [self._peak, self._largest, self._announced, self._last],
            "rested": self._rested,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._low, self._before = (math.inf if state[k] is None else float(state[k]) for k in ("low", "before"))
        self._peak, self._largest, self._announced, self._last = (float(rate) for rate in state["rates"])
        self._rested = int(state["rested"])
