"""When what is believed about a run is said without being asked.

A cause that leads the ranking at two looks in a row is volunteered, once. Looks come at steps 64, 96, 128, 192, 256, …:
each costs a reading of the whole curve.
"""

from collections.abc import Callable
from typing import Any, final

from steadystep.diagnosis.causes import Cause
from steadystep.records import Diagnosis

_FIRST = 64
_SLOW = frozenset({Cause.NO_LEARNING, Cause.LEARNING_RATE_TOO_LOW, Cause.SUSPICIOUS_PERFECTION, Cause.BATCH_SIZE_UNFIT})
_PATIENCE = 1000  # steps: before, a run that seems to stand still may only not have begun to learn


@final
class Opinion:
    """Asks `diagnose` at a cadence, and remembers what was said."""

    def __init__(self) -> None:
        self._next = _FIRST
        self._last = ""
        self._told: set[str] = set()

    def formed(self, step: int, diagnose: Callable[[], tuple[Diagnosis, ...]]) -> Diagnosis | None:
        """What to say at `step`, if anything; nearly always one comparison."""
        if step < self._next:
            return None
        while self._next <= step:
            power = 1 << (self._next.bit_length() - 1)
            self._next = power * 3 // 2 if self._next == power else 2 * power
        first = diagnose()[0]
        before, self._last = self._last, first.cause
        if first.cause in (Cause.HEALTHY, Cause.UNKNOWN) or first.cause != before or first.cause in self._told:
            return None
        if first.cause in _SLOW and step < _PATIENCE:
            return None
        self._told.add(first.cause)
        return first

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"next": self._next, "last": self._last, "told": sorted(self._told)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._next, self._last = int(state["next"]), str(state["last"])
        self._told = {str(cause) for cause in state["told"]}
