"""The canonical record of a run: `run.jsonl`, one line per optimizer step, appended, readable while it grows.

A step costs about 70 bytes. Losses have nine significant digits, enough to give back any fp32 value exactly. Settings,
incidents, per-layer norms (at a cadence and around incidents), probes, validations and the end are lines of their own;
all but the steps themselves have an allowance, so that a million steps stay below 100 MB. A torn last line is what a
crash leaves; readers skip it.
"""

import json
import math
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from steadystep._utils import this_process
from steadystep._utils.numbers import as_json, as_list
from steadystep._utils.text import logger
from steadystep.errors import ConfigError
from steadystep.records import Diagnosis, Outcome, Probe, Signals
from steadystep.tracking import Allowance
from steadystep.tracking.log_format import dropped, end, incident_line, is_gone, state, write
from steadystep.version import __version__

_FLUSH_EVERY, _FLUSH_EVERY_S = 100, 1.0  # lines; a crash loses at most these, an incident is written at once
_AROUND = 5  # steps before and after an incident whose layers are written too
# Bytes at once and per step. Steps take up to 82 each: at a million, 82 + 7.5 + 6 + 3.5 MB.
_METRICS, _LAYERS, _INCIDENTS = (1.5e6, 6.0), (1e6, 5.0), (1.5e6, 2.0)
_AGAIN = 0.1  # of the first sum, for a log that is continued: restarts must not add up
_SCALE_EVERY = 1000  # steps: a scale that did not change is written all the same, as a torn line may have held it
_RESERVE = 0.25  # of the incidents' sum is for the incidents themselves


@final
class RunLog:
    """Appends to `run_dir/run.jsonl`. A second process in the same folder adds its own header line.

    Args:
        run_dir: folder of the run.
        layers_every: steps between two lines with per-layer norms.
        settings: settings to write in the header.
        parameters: number of elements of each parameter.
        hparams: hyperparameters to write in the header.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        layers_every: int,
        settings: Mapping[str, Any] | None = None,
        parameters: Mapping[str, int] | None = None,
        hparams: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = run_dir / "run.jsonl"
        self._layers_every = layers_every
        self._pending: list[str] = []
        self._flushed = self._recorded = time.monotonic()
        self._names: tuple[str, ...] = ()
        self._probed: tuple[str, ...] = ()
        self._recent: deque[Signals] = deque(maxlen=_AROUND)
        self._written_layers = -1
        self._near_until = -1
        self._unwritten = [0]  # incidents that had no room; shared with the end
        self._scale: float | None = None
        self._last = -1
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            begun, torn = state(self.path)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"run_dir = {str(run_dir)!r}: cannot be written ({error.strerror})") from None
        self._begun = begun
        share = _AGAIN if begun else 1.0
        self._for_metrics, self._for_layers, self._for_incidents = (
            Allowance(start * share, per_step) for start, per_step in (_METRICS, _LAYERS, _INCIDENTS)
        )
        self._end_when_dropped()
        self._header = _header(settings or {}, parameters or {}, hparams or {})
        self._said_gone = False
        self._pending.append("\n" * torn + self._header)
        self._write()

    def _end_when_dropped(self) -> None:
        """Nobody has to call close(): the last lines are written when the log is dropped or the program ends."""
        ends = (self._file, self._pending, self.path, os.getpid(), self._unwritten)
        self._finish = weakref.finalize(self, dropped, *ends, id(getattr(sys, "last_value", None)))

    def _write(self) -> None:
        """What is pending; to a new file when somebody has deleted this one, or its folder."""
        if is_gone(self._file):
            self._begin_again()
        write(self._file, self._pending, self.path)

    def _begin_again(self) -> None:
        if not self._said_gone:
            self._said_gone = True
            logger.warning("%s was deleted during the run: a new log starts here", self.path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.open("a", encoding="utf-8")
        except OSError:
            return  # tried again with the next lines; training goes on
        self._finish.detach()
        self._file.close()
        self._file, self._names, self._probed = file, (), ()
        self._end_when_dropped()
        self._pending.insert(0, self._header)

    def record(self, outcome: Outcome) -> None:
        """Write one compact line; more around an incident and every `layers_every` steps."""
        signals = outcome.signals
        trouble = bool(outcome.diagnosis.findings) or not outcome.stepped
        if signals is not None:
            if self._begun and signals.step == 0:
                logger.warning(
                    "%s already contains a run: this run is appended to its log, and reports will show this one. "
                    "Use Guard.resume to continue a run, or another run_dir to keep both.",
                    self.path.parent,
                )
            self._pending.append(self._row(outcome, signals))
            self._recent.append(signals)
            if trouble:
                self._near_until = signals.step + _AROUND
            if trouble or signals.step <= self._near_until:
                self._write_around()
            elif signals.step % self._layers_every == 0 and not self._add_layers(signals, self._for_layers):
                self._layers_every *= 2  # the file has grown faster than it may: evenly coarser from here on
            if signals.probe is not None:
                self._add_probe(signals.probe)
        now = time.monotonic()
        if trouble:
            self._add_incident(outcome, now - self._recorded)
        self._recorded = now
        if trouble or len(self._pending) >= _FLUSH_EVERY or now - self._flushed >= _FLUSH_EVERY_S:
            self._flushed = now
            self._write()

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a validation, at once."""
        row = {"kind": "validation", "step": step, "metrics": {k: as_json(float(v)) for k, v in metrics.items()}}
        self._pending.append(json.dumps(row) + "\n")
        self._write()

    def believed(self, step: int | None, diagnosis: Diagnosis) -> None:
        """Write a diagnosis of the run, at once."""
        if self._finish.alive:
            row = {"kind": "verdict", "step": step, "cause": diagnosis.cause}
            row |= {"fault": diagnosis.fault, "evidence": diagnosis.evidence, "advice": diagnosis.advice}
            self._pending.append(json.dumps(row) + "\n")
            self._write()

    def close(self) -> None:
        """Write what is left and how the run ended, and close the file."""
        if self._finish.detach() is not None:
            end(self._file, self._pending, self.path, os.getpid(), self._unwritten, sys.exc_info()[1])

    def _write_around(self) -> None:
        for signals in self._recent:
            if signals.step > self._written_layers and not self._add_layers(signals, self._for_incidents, _RESERVE):
                break

    def _add_layers(self, signals: Signals, allowance: Allowance, reserve: float = 0.0) -> bool:
        changed = signals.names != self._names  # names are long and rarely change
        names = f',"names":{json.dumps(signals.names)}' if changed else ""
        line = f'{{"kind":"layers","step":{signals.step},"norms":{as_list(signals.norms)}{names}}}\n'
        if not allowance.grant(len(line), signals.step, reserve=reserve):
            return False
        self._pending.append(line)
        self._names, self._written_layers = signals.names, signals.step
        return True

    def _add_probe(self, probe: Probe) -> None:
        """Relative size of the update of each parameter, and the bound on the logits of each attention module."""
        sizes = zip(probe.update_rms, probe.weight_rms, strict=False)
        line = {"kind": "probe", "step": probe.step, "ratios": [_ratio(u, w) for u, w in sizes]}
        if probe.names != self._probed:
            line["names"] = probe.names
        if probe.logit_bounds:
            line |= {"attentions": probe.attentions, "logits": [as_json(v, 4) for v in probe.logit_bounds]}
        text = json.dumps(line, separators=(",", ":")) + "\n"
        if self._for_layers.grant(len(text), probe.step):
            self._pending.append(text)
            self._probed = probe.names

    def _add_incident(self, outcome: Outcome, seconds: float) -> None:
        line = incident_line(outcome, self.path.parent) | {"seconds": round(seconds, 4)}
        if self._unwritten[0]:
            line["unwritten"] = self._unwritten[0]
        text = json.dumps(line) + "\n"
        if self._for_incidents.grant(len(text), outcome.step):
            self._pending.append(text)
            self._unwritten[0] = 0
        else:
            self._unwritten[0] += 1

    def _row(self, outcome: Outcome, signals: Signals) -> str:
        has_scale = signals.scaled and self._is_news(signals)
        self._last = signals.step
        if signals.all_finite and not signals.metrics and not has_scale:
            # why by hand: json.dumps costs three times as much, on every step
            return (
                f'{{"step":{signals.step},"loss":{signals.loss:.9g},"norm":{signals.grad_norm:.6g}'
                f',"lr":{signals.lr * outcome.lr_mult:.6g}' + (',"clipped":1}\n' if outcome.clipped else "}\n")
            )
        row: dict[str, object] = {
            "step": signals.step,
            "loss": as_json(signals.loss),
            "norm": as_json(signals.grad_norm, 6),
            "lr": as_json(signals.lr * outcome.lr_mult, 6),
        }
        if outcome.clipped:
            row["clipped"] = 1
        if has_scale:
            row["scale"], self._scale = as_json(signals.scale, 7), signals.scale
        if signals.metrics:
            metrics = {name: as_json(value, 7) for name, value in signals.metrics.items()}
            if self._for_metrics.grant(len(str(metrics)), signals.step):
                row["metrics"] = metrics
        return json.dumps(row, separators=(",", ":")) + "\n"

    def _is_news(self, signals: Signals) -> bool:
        """A scale changes rarely, and readers carry it on; after a rollback they have forgotten it."""
        back, due = signals.step <= self._last, signals.step % _SCALE_EVERY == 0
        return signals.scale != self._scale or back or due


def _ratio(update: float, weight: float) -> float | str | None:
    """Null where it is not known: a parameter without a gradient, or one that is zero."""
    return as_json(update / weight, 4) if weight > 0.0 and math.isfinite(update / weight) else None


def _header(settings: Mapping[str, Any], parameters: Mapping[str, int], hparams: Mapping[str, Any]) -> str:
    header = {"kind": "start", "steadystep": __version__, "time": round(time.time(), 1), "process": this_process()}
    header |= {"settings": settings, "hparams": dict(hparams)}
    return json.dumps(header | {"parameters": sum(parameters.values()), "names": list(parameters)}) + "\n"
