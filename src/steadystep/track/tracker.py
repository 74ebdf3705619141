"""Where outcomes go: the log, the sinks, and the logger for a person who is watching."""

import logging
from collections.abc import Mapping
from typing import Protocol, final

from steadystep.records import Outcome
from steadystep.track.broadcast import Broadcast
from steadystep.track.messages import describe
from steadystep.track.sink import GradientSample

logger = logging.getLogger("steadystep")


class Tracker(Protocol):
    """Something that writes a run down."""

    def record(self, outcome: Outcome) -> None:
        """Write down one optimizer step."""
        ...

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write down one validation; `step` is the one that comes next."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


@final
class NoLog:
    """No run directory: nothing is written."""

    def record(self, outcome: Outcome) -> None:
        """Nowhere to write it."""

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nowhere to write it."""

    def close(self) -> None:
        """Nothing is open."""


@final
class Tracking:
    """All of them at once. Incidents also reach the `steadystep` logger."""

    def __init__(self, log: Tracker, sinks: Broadcast | None = None) -> None:
        self._log = log
        self._sinks = sinks

    def record(self, outcome: Outcome) -> None:
        """Write down one optimizer step."""
        self._log.record(outcome)
        if self._sinks is not None:
            self._sinks.record(outcome)
        if outcome.diagnosis.findings or not outcome.stepped:
            _tell(outcome)

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write down one validation."""
        self._log.validated(step, metrics)
        if self._sinks is not None:
            self._sinks.validated(step, metrics)

    def sampled(self, sample: GradientSample) -> None:
        """Gradients, for histograms."""
        if self._sinks is not None:
            self._sinks.sampled(sample)

    @property
    def wants_samples(self) -> bool:
        """Somebody makes histograms of them."""
        return self._sinks is not None

    def close(self) -> None:
        """Write what is left."""
        self._log.close()
        if self._sinks is not None:
            self._sinks.close()


def _tell(outcome: Outcome) -> None:
    routine = all(f.severity == "info" for f in outcome.diagnosis.findings) and bool(outcome.diagnosis.findings)
    # why the mark: a screen that shows incidents as cards leaves these out
    logger.log(logging.INFO if routine else logging.WARNING, describe(outcome), extra={"incident": True})
