"""Say it once, then be quiet for a while."""

from typing import Any, final

from steadystep.detectors.detector import Detector
from steadystep.records import Finding, Signals


@final
class Cooldown:
    """Silences a detector for `quiet_steps` after it speaks, except where it asks for action.

    The inner detector still sees every step, so it keeps learning.
    """

    def __init__(self, inner: Detector, *, quiet_steps: int) -> None:
        self.name = inner.name
        self.only_probes = bool(getattr(inner, "only_probes", False))
        self._inner = inner
        self._quiet_steps = quiet_steps
        self._until = -1

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """What the inner detector says, unless it said something a short while ago."""
        found = self._inner.update(signals)
        if not found:
            return found
        if signals.step < self._until:
            found = tuple(f for f in found if f.severity in ("act", "critical"))
        if found:
            self._until = signals.step + self._quiet_steps
        return found

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"until": self._until, "inner": self._inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._until = int(state["until"])
        self._inner.load_state_dict(state["inner"])
