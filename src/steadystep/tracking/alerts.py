"""Alerts: incidents, stalls and the end of a run, sent to a webhook, a command or a function.

A thread of its own delivers them from a bounded queue, with a timeout for each. What comes too often is counted and
told with the next alert. What a log says is sent as data: JSON in a request or on standard input, never a command line.
"""

import json
import queue
import shlex
import statistics
import subprocess
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, final
from urllib.parse import urlsplit

from steadystep._utils.text import logger
from steadystep.errors import ConfigError
from steadystep.records import SEVERITIES, Incident, Severity, severity_rank
from steadystep.tracking import GradientSample, RunStart, StepRow

Kind = Literal["incident", "stall", "end"]
Target = str | Sequence[str] | Callable[["Alert"], object]

_CAPACITY = 100  # alerts that may wait
_LOOK_EVERY_S = 1.0
_SLACK_HOST = "hooks.slack.com"
_FEWEST_ROWS = 5  # before anything is usual


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One message about a run."""

    kind: Kind
    """What happened: an incident, a stall, or the end of the run."""
    level: Severity
    """`info`, `warn`, `act` or `critical`, as of a finding."""
    run: str
    """Name of the run."""
    step: int
    """The optimizer step."""
    text: str
    """The message in one line."""
    cause: str = ""
    """With an incident: value of a `steadystep.diagnosis.Cause`."""
    evidence: str = ""
    """What was measured."""
    done: str = ""
    """What the guard did."""
    advice: str = ""
    """What to change."""
    time: float = 0.0
    """Seconds since 1970."""
    suppressed: int = 0
    """Alerts that were left out since the last one."""

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON payload of a webhook and of a command."""
        return asdict(self)

    def as_slack(self) -> dict[str, str]:
        """Return the payload of a Slack incoming webhook: one text, with what Slack would read as markup escaped."""
        more = f"\n{self.evidence}" if self.evidence else ""
        more += f"\ntry: {self.advice}" if self.advice else ""
        more += f"\n({self.suppressed} more since the last alert)" if self.suppressed else ""
        return {"text": (self.text + more).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}


@final
class Alerts:
    """Sink that sends alerts. It never delays training: a slow or failing target is reported once.

    Args:
        to: a webhook (`https://...`, JSON by POST; Slack's form for hooks.slack.com), a command as a string or a list
            (JSON on its standard input), or a function of an `Alert`.
        level: the lowest level to send: "info", "warn", "act" or "critical".
        every_s: seconds between two alerts of the same kind and cause.
        per_hour: most alerts within an hour.
        stall_mult: report a stall after so many times the usual time between two steps; 0 turns it off.
        stall_min_s: but not before this many seconds without a step.
        timeout_s: seconds that a request or command may take.
        clock: returns seconds.
    """

    def __init__(
        self,
        to: Target,
        *,
        level: Severity = "act",
        every_s: float = 300.0,
        per_hour: int = 20,
        stall_mult: float = 20.0,
        stall_min_s: float = 120.0,
        timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if level not in SEVERITIES:
            raise ConfigError(f"level = {level!r}: must be one of {', '.join(SEVERITIES)}")
        self._send = _sender(to, timeout_s)
        self._level, self._every_s, self._per_hour = severity_rank(level), every_s, per_hour
        self._stall = (stall_mult, stall_min_s)
        self._clock, self._timeout_s = clock, timeout_s
        self._name, self._step = "run", 0
        self._rows: deque[float] = deque(maxlen=50)
        self._sent: deque[float] = deque()
        self._last: dict[tuple[str, str], float] = {}
        self._suppressed = self._incidents = 0
        self._is_stalled = self._complained = False
        self._queue: queue.Queue[Alert | None] = queue.Queue(_CAPACITY)
        self._thread: threading.Thread | None = None

    def start(self, run: RunStart) -> None:
        """Begin to watch the time between steps."""
        self._name = run.name
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="steadystep-alerts", daemon=True)
            self._thread.start()

    def step(self, row: StepRow) -> None:
        """Note that the run goes on."""
        now = self._clock()
        if self._is_stalled:
            self._is_stalled = False
            self._put("stall", "info", f"goes on at step {row.step:,} after {now - self._rows[-1]:.0f} s")
        self._rows.append(now)
        self._step = row.step

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note that the run goes on."""
        if self._rows:
            self._rows[-1] = self._clock()  # why: a validation is no stall, and no usual step either

    def layers(self, step: int, norms: Mapping[str, float]) -> None:
        """Do nothing."""

    def histograms(self, sample: GradientSample) -> None:
        """Do nothing."""

    def incident(self, incident: Incident) -> None:
        """Send an incident, if its level is high enough."""
        self._incidents += not incident.is_routine
        self._step = incident.step
        said = f"{incident.cause} at step {incident.step:,}: {incident.done or 'reported'}"
        level: Severity = incident.severity if incident.severity in SEVERITIES else "info"
        about = {"evidence": incident.evidence, "done": incident.done, "advice": incident.advice}
        self._put("incident", level, said, cause=incident.cause, **about)

    def close(self) -> None:
        """Send the end of the run at level "info", and wait for what is left, but not for long."""
        self._put("end", "info", f"ended at step {self._step:,} with {self._incidents} incidents")
        if self._thread is not None:
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                return
            self._thread.join(self._timeout_s)

    def check(self) -> None:
        """Report a stall, once, if there has been no step for much longer than usual."""
        mult, least = self._stall
        rows = list(self._rows)
        if not mult or self._is_stalled or len(rows) < _FEWEST_ROWS:
            return
        apart = max(1, len(rows) // 4)  # why several: rows of quick steps arrive in bursts
        usual = statistics.median((b - a) / apart for a, b in zip(rows, rows[apart:], strict=False))
        silent = self._clock() - rows[-1]
        if silent > max(least, mult * usual):
            self._is_stalled = True
            said = f"no step for {silent:.0f} s after step {self._step:,} (usually {usual:.2g} s apart)"
            self._put("stall", "critical", said, advice="check the process, its data loader and the other ranks")

    def _put(self, kind: Kind, level: Severity, text: str, **about: str) -> None:
        """Into the queue, unless the level is low, it comes too often, or the queue is full."""
        if severity_rank(level) < self._level:
            return
        now, what = self._clock(), (kind, about.get("cause", ""))
        while self._sent and now - self._sent[0] > 3600.0:
            self._sent.popleft()
        soon = what in self._last and now - self._last[what] < self._every_s
        if soon or len(self._sent) >= self._per_hour or self._queue.full():
            self._suppressed += 1
            return
        self._last[what] = now
        self._sent.append(now)
        about = {"run": self._name, "text": f"{self._name}: {text}", **about}
        self._queue.put_nowait(
            Alert(kind=kind, level=level, step=self._step, time=time.time(), suppressed=self._suppressed, **about)
        )
        self._suppressed = 0

    def _work(self) -> None:
        while True:
            try:
                alert = self._queue.get(timeout=_LOOK_EVERY_S)
            except queue.Empty:
                self.check()
                continue
            if alert is None:
                return
            try:
                self._send(alert)
            except Exception as error:  # whatever it is, it must not end the alerts that follow
                if not self._complained:
                    self._complained = True
                    what = f"{type(error).__name__}: {error}"
                    logger.warning("an alert could not be sent (%s); training continues, later ones are tried", what)


def _sender(to: Target, timeout_s: float) -> Callable[[Alert], object]:
    if callable(to):
        return to
    if isinstance(to, str) and urlsplit(to).scheme in ("http", "https"):
        slack = urlsplit(to).hostname == _SLACK_HOST
        return lambda alert: _post(to, alert.as_slack() if slack else alert.as_dict(), timeout_s)
    command = shlex.split(to) if isinstance(to, str) else list(to)
    if not command or not all(isinstance(part, str) for part in command):
        raise ConfigError("alerts: give a webhook (https://...), a command, or a function")
    return lambda alert: _run(command, alert, timeout_s)


def _post(url: str, payload: Mapping[str, Any], timeout_s: float) -> None:
    body = json.dumps(payload).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})  # POST, because it has a body
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        answer.read(1024)


def _run(command: Sequence[str], alert: Alert, timeout_s: float) -> None:
    told = json.dumps(alert.as_dict())
    subprocess.run(command, input=told, text=True, timeout=timeout_s, check=True, capture_output=True)
