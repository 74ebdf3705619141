"""A learning rate that nobody announced: more than ten times what was in use."""

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
    """Speaks when the learning rate leaps, within one step, above `factor` times its largest of the last steps.

    A warm-up that climbs far, but gradually, is a plan. So is what a scheduler has announced, a return to 0.8 to 1.1
    times the largest rate used so far (a warm restart, a cycle), to where a restart led before, or to less than a tenth
    of the largest. What remains is a leap beyond all that was used, or to somewhere in between: late in a decay from
    1e-3 to 1e-5, to 5e-4. Restarts set by hand to less than 0.8 of the peak look like that once; give them as a
    schedule.

    A leap that is withdrawn within 1,000 steps was never in use: the next one is told again, the fourth no more.
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
        """A finding at the leap; from the next step on the new value is no news."""
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
        what = f"the learning rate leapt from {self._last:.3g} to {signals.lr:.3g} and no schedule announced it"
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="act",
                value=signals.lr,
                limit=limit,
                usual=self._last,
                what=what,
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
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
