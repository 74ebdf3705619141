"""Where outcomes go: the log, the sinks, and the logger for a person who is watching."""

import logging
import math
import weakref
from collections.abc import Mapping
from typing import Protocol, final

from steadystep._utils.text import logger
from steadystep.records import Diagnosis, Outcome
from steadystep.tracking import GradientSample
from steadystep.tracking.broadcast import Broadcast
from steadystep.tracking.log_format import describe


@final
class NullTracker:
    """Records nothing: rank 0 records what all ranks agreed on."""

    wants_samples = False

    def sampled(self, sample: "GradientSample") -> None:
        """Rank 0 has it."""

    def record(self, outcome: Outcome) -> None:
        """Rank 0 has it."""

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Rank 0 has it."""

    def volunteered(self, step: int, diagnosis: Diagnosis) -> None:
        """Rank 0 has it."""

    def concluded(self, diagnosis: Diagnosis | None) -> None:
        """Rank 0 has it."""

    def close(self) -> None:
        """Nothing is open."""


NEAR_STEPS = 50
"""Steps within which an incident like the last one continues its row."""
_FIRST_SUMMARY = 10
"""Repeats after which a row is summed up for the first time; then after ten times as many, and so on."""


class Row:
    """Incidents of one kind, one soon after the other: the first is shown, the others are counted and summed up."""

    def __init__(self) -> None:
        self.kind: object = None
        self.first = self.last = 0
        """Steps of the first repeat and of the last."""
        self.repeats = 0
        self._told, self._next = 0, _FIRST_SUMMARY

    def begin(self, kind: object, step: int) -> None:
        """The first of a row."""
        self.kind, self.last = kind, step
        self.repeats, self._told, self._next = 0, 0, _FIRST_SUMMARY

    def goes_on(self, kind: object, step: int) -> bool:
        """Count a repeat; False for what begins another row."""
        if kind != self.kind or step - self.last > NEAR_STEPS:
            return False
        if not self.repeats:
            self.first = step
        self.last, self.repeats = step, self.repeats + 1
        return True

    @property
    def is_due(self) -> bool:
        """Time to sum up, though the row goes on."""
        return self.repeats == self._next

    def summary(self) -> str:
        """What has not been told yet, as a clause; empty when all was."""
        if self.repeats == self._told:
            return ""
        self._told = self.repeats
        self._next = max(self._next, _FIRST_SUMMARY ** (len(str(self.repeats))))
        return f"… repeated {self.repeats:,} times (steps {self.first:,}-{self.last:,})"


@final
class Repeats:
    """Logs the first of a row of like incidents at once; the others together, when something else comes or all ends."""

    def __init__(self) -> None:
        self._row, self._last = Row(), _LastLine()
        self.until = math.inf
        """The last step at which a row that was counted may still go on."""
        # Nobody has to call close(): what was counted is logged when the guard is dropped or the program ends.
        weakref.finalize(self, _sum_up, self._row, self._last)

    def tell(self, outcome: Outcome, level: int, advice: str) -> None:
        """Log one step, or count it."""
        kind = (level, outcome.diagnosis.cause, *_kind(outcome))
        if not advice and self._row.goes_on(kind, outcome.step):
            self._last.text = describe(outcome)
            self.until = outcome.step + NEAR_STEPS
            if self._row.is_due:
                _sum_up(self._row, self._last)
            return
        self.end()
        self._row.begin(kind, outcome.step)
        self._last.level = level
        # why the mark: a screen that shows incidents as cards leaves these out
        logger.log(level, describe(outcome) + advice, extra={"incident": True})

    def end(self) -> None:
        """Log what was counted: something else comes, or the run ends."""
        _sum_up(self._row, self._last)
        self._row.kind, self.until = None, math.inf


class _LastLine:
    """The newest of a row."""

    __slots__ = ("level", "text")

    def __init__(self) -> None:
        self.level, self.text = logging.INFO, ""


def _sum_up(row: Row, last: _LastLine) -> None:
    summary = row.summary()
    if summary and row.repeats == 1:
        logger.log(last.level, last.text, extra={"incident": True})
    elif summary:
        text = last.text.partition(": ")[2]
        logger.log(last.level, f"{summary}, last: {text}", extra={"incident": True})


def _kind(outcome: Outcome) -> tuple[object, ...]:
    """What makes two incidents alike: numbers may differ, what was found and done may not."""
    plan, detectors = outcome.plan, tuple(finding.detector for finding in outcome.findings)
    place = outcome.origin.partition(":")[0]
    return (detectors, plan.actions, plan.to, plan.rank, outcome.stepped, outcome.restored, place)


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
        shown: whether a sink shows incidents on the screen; the logger then has them at level INFO, not twice there.
    """

    def __init__(self, log: Tracker, sinks: Broadcast | None = None, *, shown: bool = False) -> None:
        self.log = self._log = log
        self._shown = shown
        self._sinks = sinks
        self._advised: set[tuple[str, tuple[str, ...]]] = set()
        """Causes, and actions taken, whose advice has been given: it is given once."""
        self._has_concluded = False
        self._repeats = Repeats()

    def record(self, outcome: Outcome) -> None:
        """Write one optimizer step."""
        self._log.record(outcome)
        if self._sinks is not None:
            self._sinks.record(outcome)
        if outcome.diagnosis.findings or not outcome.stepped:
            self._tell(outcome)
        elif outcome.step > self._repeats.until:
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
        if any(cause == diagnosis.cause for cause, _ in self._advised):
            return
        self._advised.add((diagnosis.cause, ()))
        self._log.believed(step, diagnosis)
        self._repeats.end()
        logger.warning("step %d: diagnosis of the run so far: %s", step, _sentence(diagnosis))

    def concluded(self, diagnosis: Diagnosis | None) -> None:
        """Report the final diagnosis, once; at level INFO if the run is healthy."""
        self._repeats.end()
        if diagnosis is None or self._has_concluded:
            return
        self._has_concluded = True
        self._log.believed(None, diagnosis)
        healthy = diagnosis.cause == "healthy"
        logger.log(logging.INFO if healthy else logging.WARNING, "diagnosis of this run: %s", _sentence(diagnosis))

    def _tell(self, outcome: Outcome) -> None:
        diagnosis = outcome.diagnosis
        routine = bool(diagnosis.findings) and all(f.severity == "info" for f in diagnosis.findings)
        advice = ""
        heard = (diagnosis.cause, outcome.plan.actions)
        if not routine and diagnosis.advice and heard not in self._advised:
            self._advised.add(heard)
            advice = f"; try: {diagnosis.advice}"
        self._repeats.tell(outcome, logging.INFO if routine or self._shown else logging.WARNING, advice)

    def close(self) -> None:
        """Write what is left."""
        self._repeats.end()
        self._log.close()
        if self._sinks is not None:
            self._sinks.close()


def _sentence(diagnosis: Diagnosis) -> str:
    advice = f"; try: {diagnosis.advice}" if diagnosis.advice else ""
    return f"{diagnosis.cause}: {diagnosis.evidence}{advice}"
