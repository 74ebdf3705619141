"""Where outcomes go: the log, the sinks, and the logger for a person who is watching."""

import logging
from collections.abc import Mapping
from typing import Protocol, final

from steadystep.records import Action, Diagnosis, Outcome
from steadystep.tracking.broadcast import Broadcast
from steadystep.tracking.log_format import describe
from steadystep.tracking.sink import GradientSample


@final
class NullTracker:
    """Writes and says nothing: what rank 0 writes down is what all ranks agreed on."""

    wants_samples = False

    def sampled(self, sample: "GradientSample") -> None:
        """Rank 0 has it."""

    def record(self, outcome: Outcome) -> None:
        """Rank 0 has it."""

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Rank 0 has it."""

    def volunteered(self, step: int, diagnosis: Diagnosis) -> None:
        """Rank 0 says it."""

    def concluded(self, diagnosis: Diagnosis | None) -> None:
        """Rank 0 says it."""

    def close(self) -> None:
        """Nothing is open."""


logger = logging.getLogger("steadystep")

_MOST = 100  # steps: whoever watches a run that goes on like this hears of it again


@final
class Repeats:
    """Says the first at once; the others are counted, and said together when something else comes or the run stops."""

    def __init__(self) -> None:
        self._text = ""
        self._level = logging.INFO
        self._first = self._last = -1

    def tell(self, outcome: Outcome, level: int, advice: str) -> None:
        """One step with something to say."""
        text = describe(outcome).partition(": ")[2]
        if text == self._text and not advice and outcome.step == self._last + 1:
            self._last = outcome.step
            if Action.STOP in outcome.plan.actions or self._last - self._first >= _MOST:
                self._say()
            return
        self.end()
        self._text, self._level, self._first, self._last = text, level, outcome.step, outcome.step
        # why the mark: a screen that shows incidents as cards leaves these out
        logger.log(level, describe(outcome) + advice, extra={"incident": True})

    def end(self) -> None:
        """Something else comes."""
        self._say()
        self._text = ""

    def _say(self) -> None:
        count = self._last - self._first
        if self._text and count == 1:
            logger.log(self._level, f"step {self._last}: {self._text}", extra={"incident": True})
        elif self._text and count > 1:
            steps = f"steps {self._first + 1} to {self._last}"
            logger.log(self._level, f"{steps}: the same {count} times more: {self._text}", extra={"incident": True})
        self._first = self._last


class Tracker(Protocol):
    """Protocol of a log that a run is written to."""

    def record(self, outcome: Outcome) -> None:
        """Write one optimizer step."""
        ...

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one validation; `step` is the next optimizer step."""
        ...

    def believed(self, step: int | None, diagnosis: Diagnosis) -> None:
        """Write a diagnosis of the run at `step`, or at its end."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


@final
class NoLog:
    """A tracker that writes nothing, for runs without a folder."""

    def record(self, outcome: Outcome) -> None:
        """Do nothing."""

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Do nothing."""

    def believed(self, step: int | None, diagnosis: Diagnosis) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@final
class Tracking:
    """The log and the sinks of one run. Incidents also go to the `steadystep` logger.

    Args:
        log: the run log.
        sinks: sends to sinks; None without any.
    """

    def __init__(self, log: Tracker, sinks: Broadcast | None = None) -> None:
        self._log = log
        self._sinks = sinks
        self._advised: set[str] = set()
        """Causes whose advice has been given: it is heard once."""
        self._has_concluded = False
        self._repeats = Repeats()

    def record(self, outcome: Outcome) -> None:
        """Write one optimizer step."""
        self._log.record(outcome)
        if self._sinks is not None:
            self._sinks.record(outcome)
        if outcome.diagnosis.findings or not outcome.stepped:
            self._tell(outcome)
        else:
            self._repeats.end()

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one validation."""
        self._log.validated(step, metrics)
        if self._sinks is not None:
            self._sinks.validated(step, metrics)

    def sampled(self, sample: GradientSample) -> None:
        """Send gradients for histograms."""
        if self._sinks is not None:
            self._sinks.sampled(sample)

    @property
    def wants_samples(self) -> bool:
        """Whether any sink takes histograms."""
        return self._sinks is not None

    def volunteered(self, step: int, diagnosis: Diagnosis) -> None:
        """Report a diagnosis of the run unasked, unless an incident has reported it."""
        if diagnosis.cause in self._advised:
            return
        self._advised.add(diagnosis.cause)
        self._log.believed(step, diagnosis)
        logger.warning("step %d: the run so far looks like %s", step, _sentence(diagnosis))

    def concluded(self, diagnosis: Diagnosis | None) -> None:
        """Report the final diagnosis, once; on screen unless the run is healthy."""
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
