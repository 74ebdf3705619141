"""A learning rate that nobody announced: more than ten times the largest one used so far."""

from typing import Any, final

from steadystep.records import Finding, Signals

_ARMED_AFTER = 32  # steps with a learning rate above zero: a warm-up multiplies it many times in its first steps


@final
class LearningRateJump:
    """Speaks at the step where the learning rate leaps above `factor` times its largest so far.

    The leap must happen within one step: a warm-up that climbs far, but gradually, is a plan. So is one that jumps, by
    epochs say, to what its scheduler has announced.
    """

    name = "learning-rate-jump"

    def __init__(self, *, factor: float = 10.0) -> None:
        self._factor = factor
        self._largest = 0.0
        self._last = 0.0
        self._seen = 0

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """A finding at the leap; from the next step on the new value is no news."""
        lr = signals.lr
        if not 0.0 < lr < float("inf"):
            return ()  # a learning rate of 0 (before a warm-up, in between) is nothing to compare with
        if lr == self._last:
            self._seen += 1
            return ()
        usual, last, self._last = self._largest, self._last, lr
        self._seen += 1
        self._largest = max(usual, lr)
        limit = self._factor * usual
        known = lr <= limit or lr <= self._factor / 2.0 * last or lr <= signals.announced_lr
        if self._seen <= _ARMED_AFTER or known:
            return ()
        what = f"the learning rate leapt to {lr:.3g}; the largest before was {usual:.3g} and no schedule announced more"
        return (
            Finding(
                detector=self.name, step=signals.step, severity="act", value=lr, limit=limit, usual=usual, what=what
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"largest": self._largest, "last": self._last, "seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._largest, self._last, self._seen = float(state["largest"]), float(state["last"]), int(state["seen"])
