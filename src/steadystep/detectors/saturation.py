"""Saturated activations: most outputs of a sigmoid or tanh are where it is flat, and the loss no longer falls."""

import math
from typing import Any, final

from steadystep.detectors.detector import Runs
from steadystep.records import Finding, Signals

_SATURATED = 0.7  # of the values of an activation
_SATURATED_QUIET_STEPS = 4  # the first probes follow each other too closely to count as lasting
_LEARNT = 0.5  # of the first loss: below it, a classifier is sure of itself and saturates rightly
_FEWEST_LOSSES = 16  # on either side of a probe
_LEAST_FALL = 0.02  # of the level, as in `diagnosis.learning`
_SIGMAS = 3.0
_LARGEST = 1e150


@final
class Stretch:
    """Mean and spread of the finite losses between two probes (Welford 1962)."""

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, 0.0, 0.0

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return math.sqrt(max(0.0, self._squares)) / max(1, self.count)

    def learn(self, loss: float) -> None:
        """Add one loss; NaN is passed over, and what has no finite square."""
        if abs(loss) < _LARGEST:
            self.count += 1
            delta = loss - self.mean
            self.mean += delta / self.count
            self._squares += delta * (loss - self.mean)

    def state_dict(self) -> list[float]:
        """Return the state, ready for JSON."""
        return [self.count, self.mean, self._squares]

    def load_state_dict(self, state: list[float]) -> None:
        """Continue from `state`."""
        self.count, self.mean, self._squares = int(state[0]), float(state[1]), float(state[2])


@final
class SaturatedUnits:
    """Warns once for each activation with over 70 % saturated values in three probes in a row, where learning stalls.

    It does not while the mean loss since the last probe is below that of the stretch before it, by 2 % and by more than
    its noise, nor below half of the first loss. A loss that started at zero or below counts as high while it has not
    fallen at all.
    """

    name = "saturated-units"

    def __init__(self) -> None:
        self._runs = Runs(3)
        self._first: float | None = None
        self._before = Stretch()
        self._since = Stretch()

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return one finding for all activations that were just confirmed saturated."""
        if self._first is None and math.isfinite(signals.loss):
            self._first = signals.loss
        self._since.learn(signals.loss)
        probe = signals.probe
        if probe is None or not probe.saturated or probe.step <= _SATURATED_QUIET_STEPS:
            return ()
        high = self._is_high(signals.loss) and not self._falls()
        shares = dict(zip(probe.modules, probe.saturated, strict=False))
        where = self._runs.add({name: high and share > _SATURATED for name, share in shares.items()})
        if not where:
            return ()
        worst = max(shares[name] for name in where)
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="warn",
                value=worst,
                limit=_SATURATED,
                what=f"up to {worst:.0%} of the outputs of a sigmoid or tanh are saturated",
                where=where,
            ),
        )

    def _falls(self) -> bool:
        """Whether the loss has fallen from the stretch before the last probe to the one since."""
        before, since = self._before, self._since
        self._before, self._since = since, Stretch()
        if min(before.count, since.count) < _FEWEST_LOSSES:
            return False
        fall = before.mean - since.mean
        return fall > max(_LEAST_FALL * abs(before.mean), _SIGMAS * math.hypot(before.error, since.error))

    def _is_high(self, loss: float) -> bool:
        if self._first is None:
            return False
        return loss > _LEARNT * self._first if self._first > 0.0 else loss >= self._first

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        stretches = [self._before.state_dict(), self._since.state_dict()]
        return {"runs": self._runs.state_dict(), "first": self._first, "stretches": stretches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._runs.load_state_dict(state["runs"])
        self._first = None if state["first"] is None else float(state["first"])
        for stretch, saved in zip((self._before, self._since), state.get("stretches", ()), strict=False):
            stretch.load_state_dict(saved)  # older states do not have them
