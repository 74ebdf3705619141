"""What a detector is."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, final

from steadystep.records import GRAVE, Finding, Signals

_OCCASIONAL = ("metrics", "batch_rms", "buffer_peaks", "odd_replicas", "bit_flips", "miscomputations")


class Detector(Protocol):
    """Protocol of a detector: sees every step's signals in order, before the update, and returns what it found.

    The state is plain JSON; a detector that is saved and loaded continues as if never interrupted. One with an
    attribute `only_probes = True` is called only at steps with a probe; one with `needs = "metrics"` (or "batch_rms",
    "buffer_peaks", "odd_replicas", "bit_flips", "miscomputations") only where the signals contain it.
    """

    name: str
    """Name of the detector in findings and logs."""

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return the findings about this step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        ...


def sees_every_step(detector: Detector) -> bool:
    """Return whether a detector is also called at steps without a probe.

    Args:
        detector: the detector.
    """
    return not getattr(detector, "only_probes", False)


def occasional(signals: Signals) -> tuple[bool, ...]:
    """Return which of the optional signals are present, in the order of `_OCCASIONAL`.

    Args:
        signals: the signals of one step.
    """
    has_batch = signals.batch_rms is not None
    rare = bool(signals.odd_replicas), bool(signals.bit_flips), bool(signals.miscomputations)
    return bool(signals.metrics), has_batch, bool(signals.buffer_peaks), *rare


def has_what_it_needs(detector: Detector, given: tuple[bool, ...]) -> bool:
    """Return whether a detector can find or learn anything from signals with these parts.

    Args:
        detector: the detector.
        given: what `occasional` returned for the signals.
    """
    needs = getattr(detector, "needs", "")
    return needs not in _OCCASIONAL or given[_OCCASIONAL.index(needs)]


@final
class Cooldown:
    """Silences a detector for `quiet_steps` after a finding, except where it asks for action.

    The inner detector still sees every step, so it keeps learning.

    Args:
        inner: the detector.
        quiet_steps: steps of silence after a finding.
        as_notes: limit warnings only, and turn those that come too soon into notes: they may concern a different layer
            or metric, and a note still counts as evidence.
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
        """Return the findings of the inner detector, unless it had one a short while ago."""
        found = self._inner.update(signals)
        if not found:
            return found
        if self._as_notes:
            return self._rationed(found, signals.step)
        if signals.step < self._until:
            found = tuple(f for f in found if f.severity in GRAVE)
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
        """Return the state, ready for JSON."""
        return {"until": self._until, "inner": self._inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        wrapped = "inner" in state  # states of detectors that had no cooldown then do not have it
        self._until = int(state["until"]) if wrapped else -1
        self._inner.load_state_dict(state["inner"] if wrapped else state)


@final
class Runs:
    """Counts per name; each name is reported once, when its count reaches `patience`."""

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._counts: dict[str, int] = {}
        self._said: set[str] = set()

    def add(self, concerns: Mapping[str, bool]) -> tuple[str, ...]:
        """The names that have just been of concern often enough in a row. One that is not mentioned keeps its count."""
        reached = []
        for name, concern in concerns.items():
            if not concern:
                self._counts.pop(name, None)
            elif name not in self._said:
                self._counts[name] = self._counts.get(name, 0) + 1
                if self._counts[name] >= self._patience:
                    reached.append(name)
        self._said.update(reached)
        return tuple(reached)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {"counts": dict(self._counts), "said": sorted(self._said)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._counts = {name: int(count) for name, count in state["counts"].items()}
        self._said = set(state["said"])
