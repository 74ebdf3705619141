"""Say it once, then be quiet for a while."""

from dataclasses import replace
from typing import Any, final

from steadystep.detectors.detector import Detector
from steadystep.records import Finding, Signals

_GRAVE = ("act", "critical")


@final
class Cooldown:
    """Silences a detector for `quiet_steps` after it speaks, except where it asks for action.

    The inner detector still sees every step, so it keeps learning. With `as_notes` only warnings are rationed, and
    those that come too soon become notes: a different layer or metric may be meant, and a note can still be weighed.
    """

    def __init__(self, inner: Detector, *, quiet_steps: int, as_notes: bool = False) -> None:
        self.name = inner.name
        self.only_probes = bool(getattr(inner, "only_probes", False))
        self.needs: str = getattr(inner, "needs", "")
        self._inner = inner
        self._quiet_steps = quiet_steps
        self._as_notes = as_notes
        self._until = -1

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """What the inner detector says, unless it said something a short while ago."""
        found = self._inner.update(signals)
        if not found:
            return found
        if self._as_notes:
            return self._rationed(found, signals.step)
        if signals.step < self._until:
            found = tuple(f for f in found if f.severity in _GRAVE)
        if found:
            self._until = signals.step + self._quiet_steps
        return found

    def _rationed(self, found: tuple[Finding, ...], step: int) -> tuple[Finding, ...]:
        """At most one warning in `quiet_steps`; the rest are notes."""
        told = []
        for finding in found:
            if finding.severity == "warn" and step < self._until:
                told.append(replace(finding, severity="info"))
                continue
            if finding.severity == "warn":
                self._until = step + self._quiet_steps
            told.append(finding)
        return tuple(told)

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"until": self._until, "inner": self._inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        wrapped = "inner" in state  # states of detectors that had no cooldown then do not have it
        self._until = int(state["until"]) if wrapped else -1
        self._inner.load_state_dict(state["inner"] if wrapped else state)
