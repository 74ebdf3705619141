"""Carries a run to its sinks on one background thread. The training puts things into a queue and goes on."""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any, final

from steadystep._utils.text import logger
from steadystep.records import Outcome, Signals
from steadystep.tracking import GradientSample, RunStart, Sink, StepRow
from steadystep.tracking.log_format import incident_from

_GATHER_S = 0.5  # why: a thread that wakes for every point costs the training three times what the point costs
_URGENT = ("start", "incident")

_Message = tuple[str, tuple[Any, ...]]
_Queue = queue.SimpleQueue["_Message | None"]  # reentrant: its end may be put in by the garbage collector
_Bell = queue.SimpleQueue[None]


@final
class Mailbox:
    """`put` never waits. A sink that raises is reported once and dropped; a full queue drops, and says so once."""

    def __init__(self, sinks: Sequence[Sink], *, capacity: int, patience_s: float) -> None:
        self._queue: _Queue = queue.SimpleQueue()
        self._bell: _Bell = queue.SimpleQueue()
        self._capacity = capacity
        self._alive = list(sinks)
        self._thread: threading.Thread | None = None
        self._said = False
        self._patience_s = patience_s
        self._finish: weakref.finalize[Any, Any] | None = None

    def put(self, method: str, *arguments: Any) -> None:
        """Hand something to the sinks, some time soon."""
        if not self._alive:
            return
        if self._thread is None:
            self._begin()
        if self._queue.qsize() < self._capacity:
            self._queue.put((method, arguments))
            if method in _URGENT:
                self._bell.put(None)
        elif not self._said:
            self._said = True
            names = ", ".join(_name(sink) for sink in list(self._alive))
            logger.warning("%s cannot keep up: some points will be missing there; training continues", names)

    @property
    def waiting(self) -> int:
        """Messages in the queue."""
        return self._queue.qsize()

    def close(self) -> None:
        """Wait until all is handed over, but not for ever."""
        if self._finish is not None:
            self._finish()

    def _begin(self) -> None:
        # why a daemon: a sink that hangs must not keep the program alive
        self._thread = threading.Thread(
            target=_deliver, args=(self._queue, self._bell, self._alive), name="steadystep-sinks", daemon=True
        )
        # Nobody has to call close(): what is left is handed over when the guard is dropped or the program ends.
        self._finish = weakref.finalize(
            self, _finish, self._queue, self._bell, self._thread, self._alive, self._patience_s
        )
        self._thread.start()


def _deliver(messages: _Queue, bell: _Bell, alive: list[Sink]) -> None:
    while (message := messages.get()) is not None:
        method, arguments = message
        _to_each(alive, method, arguments)
        if messages.empty():  # the next ones are handed over together
            with suppress(queue.Empty):
                bell.get(timeout=_GATHER_S)
    _to_each(alive, "close", ())


def _to_each(alive: list[Sink], method: str, arguments: tuple[Any, ...]) -> None:
    for sink in list(alive):
        try:
            getattr(sink, method)(*arguments)
        except BaseException as error:  # whatever it is, it must not end the training
            alive.remove(sink)
            logger.warning(
                "sink %s failed and is disabled (%s: %s); training continues", _name(sink), type(error).__name__, error
            )
            if method != "close":
                with suppress(BaseException):  # files and connections; whether it works is no news
                    sink.close()


def _finish(messages: _Queue, bell: _Bell, thread: threading.Thread, alive: list[Sink], patience_s: float) -> None:
    messages.put(None)
    bell.put(None)
    if thread is threading.current_thread():  # the collector ran in here: what is left is handed over next
        return
    thread.join(patience_s)
    if thread.is_alive():
        names = ", ".join(_name(sink) for sink in list(alive))
        logger.warning("%s did not finish within %g s; its last points may be missing", names, patience_s)


def _name(sink: Sink) -> str:
    return type(sink).__name__


_EVERY_STEP_UNTIL = 100  # the beginning is shown in full
_AT_LEAST_EVERY_S = 1.0  # where steps are slow, each of them is shown
_MOST_LAYERS = 128  # of a model with more, evenly chosen ones are shown; the run log has them all


@final
class Broadcast:
    """Sends steps to sinks on a thread of its own: every n-th step, incidents, and layers at a cadence.

    Args:
        sinks: where to send.
        run: what is known about the run.
        every: steps between two rows; the first 100 steps and slow steps are all sent.
        layers_every: steps between two rows of per-layer norms.
        clock: returns seconds.
        capacity: messages that may wait before new ones are dropped.
        patience_s: seconds to wait for the sinks at the end.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        run: RunStart,
        *,
        every: int,
        layers_every: int,
        clock: Callable[[], float] = time.monotonic,
        capacity: int = 1000,
        patience_s: float = 30.0,
    ) -> None:
        self._mailbox = Mailbox(sinks, capacity=capacity, patience_s=patience_s)
        self._run = run
        self._every = every
        self._layers_every = layers_every
        self._clock = clock
        self._last_time = 0.0
        self._started = False
        self._held: Outcome | None = None

    def record(self, outcome: Outcome) -> None:
        """Send one optimizer step, if it is due or an incident."""
        signals = outcome.signals
        trouble = bool(outcome.diagnosis.findings) or not outcome.stepped
        if signals is not None:
            self._held = outcome
            now, step = self._clock(), signals.step
            if trouble or step % self._every == 0 or step < _EVERY_STEP_UNTIL or now >= self._last_time:
                self._last_time = now + _AT_LEAST_EVERY_S
                self._show()
            if trouble or self._layers_due(step):
                self._send(step, "layers", step, _layers(signals))
        if trouble:
            self._send(outcome.step, "incident", incident_from(outcome))

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a validation."""
        self._send(step, "validation", step, {name: float(value) for name, value in metrics.items()})

    def sampled(self, sample: GradientSample) -> None:
        """Send gradients for histograms."""
        self._send(sample.step, "histograms", sample)

    @property
    def waiting(self) -> int:
        """Number of messages that the sinks have not taken yet."""
        return self._mailbox.waiting

    def close(self) -> None:
        """Send the last step, wait for the sinks for a while, and release them."""
        self._show()
        self._mailbox.close()

    def _show(self) -> None:
        """The newest step, unless it was shown."""
        outcome, self._held = self._held, None
        if outcome is not None and outcome.signals is not None:
            self._send(outcome.step, "step", _row(outcome, outcome.signals))

    def _layers_due(self, step: int) -> bool:
        """Ten times at the given cadence, then at a fifth of it: event files are checksummed byte by byte in Python."""
        every = self._layers_every if step < 10 * self._layers_every else 5 * self._layers_every
        return step % every == 0

    def _send(self, step: int, method: str, *arguments: Any) -> None:
        if not self._started:
            self._started = True
            self._mailbox.put("start", replace(self._run, step=step))
        self._mailbox.put(method, *arguments)


def _row(outcome: Outcome, signals: Signals) -> StepRow:
    return StepRow(
        step=signals.step,
        loss=signals.loss,
        grad_norm=signals.grad_norm,
        lr=signals.lr * outcome.lr_mult,
        stepped=outcome.stepped,
        clipped=outcome.clipped,
        scale=signals.scale if signals.scaled else None,
        metrics=signals.metrics,
    )


def _layers(signals: Signals) -> dict[str, float]:
    apart = -(-len(signals.names) // _MOST_LAYERS) or 1
    return dict(islice(zip(signals.names, signals.norms, strict=True), 0, None, apart))
