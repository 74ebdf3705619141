"""Where outcomes go: the log, the sinks, and the logger for a person who is watching."""

import logging
from collections.abc import Mapping
from typing import Protocol, final

from steadystep.records import Diagnosis, Outcome
from steadystep.track.broadcast import Broadcast
from steadystep.track.repeats import Repeats
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

    def believed(self, step: int | None, diagnosis: Diagnosis) -> None:
        """Write down what is thought of the run at `step`, or at its end."""
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

    def believed(self, step: int | None, diagnosis: Diagnosis) -> None:
        """Nowhere to write it."""

    def close(self) -> None:
        """Nothing is open."""


@final
class Tracking:
    """All of them at once. Incidents also reach the `steadystep` logger."""

    def __init__(self, log: Tracker, sinks: Broadcast | None = None) -> None:
        self._log = log
        self._sinks = sinks
        self._advised: set[str] = set()
        """Causes whose advice has been given: it is heard once."""
        self._has_concluded = False
        self._repeats = Repeats()

    def record(self, outcome: Outcome) -> None:
        """Write down one optimizer step."""
        self._log.record(outcome)
        if self._sinks is not None:
            self._sinks.record(outcome)
        if outcome.diagnosis.findings or not outcome.stepped:
            self._tell(outcome)
        else:
            self._repeats.end()

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

    def volunteered(self, step: int, diagnosis: Diagnosis) -> None:
        """What `diagnose()` would say, unasked; not where an incident has said it."""
        if diagnosis.cause in self._advised:
            return
        self._advised.add(diagnosis.cause)
        self._log.believed(step, diagnosis)
        logger.warning("step %d: the run so far looks like %s", step, _sentence(diagnosis))

    def concluded(self, diagnosis: Diagnosis | None) -> None:
        """The closing verdict, once; for a person to see unless all is well."""
        if diagnosis is None or self._has_concluded:
            return
        self._has_concluded = True
        self._log.believed(None, diagnosis)
        healthy = diagnosis.cause == "healthy"
        logger.log(logging.INFO if healthy else logging.WARNING, "this run was %s", _sentence(diagnosis))

    def _tell(self, outcome: Outcome) -> None:
        diagnosis = outcome.diagnosis
        routine = bool(diagnosis.findings) and all(f.severity == "info" for f in diagnosis.findings)
        advice = ""
        if not routine and diagnosis.advice and diagnosis.cause not in self._advised:
            self._advised.add(diagnosis.cause)
            advice = f"; try: {diagnosis.advice}"
        self._repeats.tell(outcome, logging.INFO if routine else logging.WARNING, advice)

    def close(self) -> None:
        """Write what is left."""
        self._repeats.end()
        self._log.close()
        if self._sinks is not None:
            self._sinks.close()


def _sentence(diagnosis: Diagnosis) -> str:
    advice = f"; try: {diagnosis.advice}" if diagnosis.advice else ""
    return f"{diagnosis.cause}: {diagnosis.evidence}{advice}"
