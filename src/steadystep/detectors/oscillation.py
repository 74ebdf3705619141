"""A loss that swings instead of going down."""

import math
from operator import mul
from typing import Any, final

from steadystep.records import Finding, Severity, Signals

_NOTHING: tuple[Finding, ...] = ()
_SIZE = 64
_HALF = _SIZE // 2
_TIMES = tuple(i - (_SIZE - 1) / 2 for i in range(_SIZE))
_TIMES_SQUARED = sum(map(mul, _TIMES, _TIMES))
_HALF_PERIODS = (1, 2, 3, 4)
_OPPOSED = -0.6  # autocorrelation half a period apart; independent noise stays above -0.5 in a window of 64
_AGREED = 0.5  # and a whole period apart
_MATERIAL = 0.05  # of the level, or of the way the loss has come
_WILD = 0.2
_FALL = 0.25  # of the swing: less than this from one half of the window to the other is no progress
_GREW = 2.0
_LOUDER = 3.0
_WORSE = 1.5


@final
class Oscillation:
    """Checks 64 losses at a time for a short cycle (2 to 8 steps) or for jumps that outgrew the run's own noise.

    A cycle alone is a note: two tasks in turn, or four fixed batches per epoch, look the same in a healthy run. A cycle
    that doubles while neither its tops nor its bottoms fall is a warning.

    Args:
        quiet_steps: steps between two findings of one severity.
    """

    name = "oscillation"

    def __init__(self, *, quiet_steps: int = 2000) -> None:
        self._quiet_windows = max(1, quiet_steps // _SIZE)
        self._losses: list[float] = []
        self._start: float | None = None
        self._calmest = (0.0, 0.0)  # swing and level of the calmest window so far
        self._rest = {"info": 0, "warn": 0}

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return at most one finding every 64 losses; non-finite losses do not count."""
        loss = signals.loss
        if loss - loss == 0.0:
            self._losses.append(loss)
            if len(self._losses) == _SIZE:
                return self._judge(signals)
        return _NOTHING

    def _judge(self, signals: Signals) -> tuple[Finding, ...]:
        losses, self._losses = self._losses, []
        self._rest = {severity: max(0, rest - 1) for severity, rest in self._rest.items()}
        level = sum(losses) / _SIZE
        slope = sum(map(mul, _TIMES, losses)) / _TIMES_SQUARED
        swings = [loss - level - slope * time for loss, time in zip(losses, _TIMES, strict=True)]
        power = sum(map(mul, swings, swings))
        if not 0.0 < power < math.inf:
            return _NOTHING
        size = math.sqrt(power / _SIZE)
        if self._start is None:
            self._start, self._calmest = sum(losses[:4]) / 4, (size, level)
        material = _MATERIAL * max(abs(level), abs(self._start - level))
        found = _NOTHING
        if size > material and sum(losses[:_HALF]) - sum(losses[_HALF:]) < _HALF * _FALL * size:
            half = _half_period(swings, power)
            if half:
                found = self._cycle(signals, losses, size, material, f"{_swings(size, level)} every {2 * half} steps")
            elif size > _WILD * abs(level):
                found = self._jumps(signals, level, size)
        if size < self._calmest[0]:
            self._calmest = (size, level)
        return found

    def _cycle(
        self, signals: Signals, losses: list[float], size: float, material: float, what: str
    ) -> tuple[Finding, ...]:
        first, last = _reach(losses[:16]), _reach(losses[-16:])
        falls = _bottom(losses[:_HALF]) - _bottom(losses[_HALF:]) > _FALL * size
        if last > _GREW * first and not falls:
            return self._say(
                signals, "warn", last, _GREW * first, f"{what}; the amplitude doubled within {_SIZE} steps"
            )
        return self._say(signals, "info", size, material, f"{what} and is not decreasing")

    def _jumps(self, signals: Signals, level: float, size: float) -> tuple[Finding, ...]:
        calm, before = self._calmest
        if size > _LOUDER * calm and level >= before:
            what = f"{_swings(size, level)}, {size / calm:.3g} times its earlier amplitude, and is no lower"
            return self._say(signals, "info", size, _LOUDER * calm, what)
        if self._start is not None and level > _WORSE * self._start > 0.0:
            what = f"{_swings(size, level)}; it began at {self._start:.3g}"
            return self._say(signals, "info", level, _WORSE * self._start, what)
        return _NOTHING

    def _say(self, signals: Signals, severity: Severity, value: float, limit: float, what: str) -> tuple[Finding, ...]:
        if self._rest[severity]:
            return _NOTHING
        self._rest[severity] = self._quiet_windows
        return (Finding(detector=self.name, step=signals.step, severity=severity, value=value, limit=limit, what=what),)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "losses": list(self._losses),
            "start": self._start,
            "calmest": list(self._calmest),
            "rest": dict(self._rest),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._losses = [float(x) for x in state["losses"]]
        self._start = None if state["start"] is None else float(state["start"])
        swing, level = state["calmest"]
        self._calmest = (float(swing), float(level))
        self._rest = {severity: int(rest) for severity, rest in state["rest"].items()}


def _swings(size: float, level: float) -> str:
    return f"the loss oscillates by {size:.3g} around {level:.3g}"


def _half_period(swings: list[float], power: float) -> int:
    """Half the period of the shortest cycle; 0 without one."""
    for half in _HALF_PERIODS:
        opposed = sum(map(mul, swings, swings[half:])) < _OPPOSED * power
        if opposed and sum(map(mul, swings, swings[2 * half :])) > _AGREED * power:
            return half
    return 0


def _reach(losses: list[float]) -> float:
    """From the third smallest to the third largest, so that two outliers do not matter."""
    ordered = sorted(losses)
    return ordered[-3] - ordered[2]


def _bottom(losses: list[float]) -> float:
    return sorted(losses)[len(losses) // 4]
