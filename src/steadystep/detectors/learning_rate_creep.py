"""A learning rate that had come to rest and then climbs, step by step, to where it has never been."""

from typing import Any, final

from steadystep.records import Finding, Signals

_RESTED = 64  # steps without a rise; a warm-up rises all the time
_GRADUAL = 1.5  # a larger rise within one step is a decision, or a leap that another detector sees
_FALL = 0.5  # within one step: what follows may be another warm-up


@final
class LearningRateCreep:
    """Speaks once when the learning rate has climbed to `factor` times its largest before the climb, unannounced.

    A forgotten `gamma` above 1, a schedule stepped with the wrong sign: long before the loss shows it. Warm-ups never
    came to rest or begin with a sudden fall, warm restarts return to what was there before, and torch's schedulers
    announce where they go.
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
        """At most one finding for each climb."""
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
                usual=before,
                since=self._since,
                what=f"the learning rate has crept up from {before:.3g} to {lr:.3g} and no schedule announced it",
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
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
