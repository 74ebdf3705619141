"""Carries a run to its sinks on one background thread. The training puts things into a queue and goes on."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, final

from steadystep.records import Outcome, Signals
from steadystep.track.incident_line import incident_from
from steadystep.track.mailbox import Mailbox
from steadystep.track.sink import GradientSample, RunStart, Sink, StepRow

_EVERY_STEP_UNTIL = 100  # the beginning is shown in full
_AT_LEAST_EVERY_S = 1.0  # where steps are slow, each of them is shown
_MOST_LAYERS = 128  # of a model with more, evenly chosen ones are shown; the run log has them all


@final
class Broadcast:
    """Chooses what the sinks see: every `every`-th step, the steps of incidents, layers every `layers_every` steps."""

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
        """Show one optimizer step, if it is its turn or worth it."""
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
        """Show a validation."""
        self._send(step, "validation", step, {name: float(value) for name, value in metrics.items()})

    def sampled(self, sample: GradientSample) -> None:
        """Show gradients."""
        self._send(sample.step, "histograms", sample)

    @property
    def waiting(self) -> int:
        """What the sinks have not taken yet."""
        return self._mailbox.waiting

    def close(self) -> None:
        """Show the last step, wait for the sinks for a while, and let them go."""
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
