"""The canonical record of a run: `run.jsonl`, one line per optimizer step, appended, readable while it grows.

A step costs about 80 bytes. Numbers have nine significant digits, enough to give back any fp32 value exactly.
Incidents and per-layer norms (at a cadence) are lines of their own. A torn last line is what a crash leaves; readers
skip it.
"""

import json
import logging
import math
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol, final

from steadystep.errors import ConfigError
from steadystep.records import Outcome, Signals
from steadystep.track.messages import describe
from steadystep.version import __version__

logger = logging.getLogger("steadystep")

_FLUSH_EVERY = 100  # steps; a crash loses at most these lines, an incident is written at once


class Tracker(Protocol):
    """Where outcomes go."""

    def record(self, outcome: Outcome) -> None:
        """Write down one optimizer step."""
        ...

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write down one validation."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


@final
class NoLog:
    """No run directory: incidents still reach the `steadystep` logger."""

    def record(self, outcome: Outcome) -> None:
        """Say what went wrong, if anything."""
        if outcome.diagnosis.findings or not outcome.stepped:
            _tell(outcome)

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nowhere to write it."""

    def close(self) -> None:
        """Nothing is open."""


@final
class RunLog:
    """Appends to `run_dir/run.jsonl`. A second run in the same folder adds its own header line."""

    def __init__(self, run_dir: Path, *, layers_every: int) -> None:
        self.path = run_dir / "run.jsonl"
        self._layers_every = layers_every
        self._pending: list[str] = []
        self._names: tuple[str, ...] = ()
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            torn = _is_torn(self.path)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"run_dir = {str(run_dir)!r}: cannot be written ({error.strerror})") from None
        # Nobody has to call close(): the last lines are written when the log is dropped or the program ends.
        self._finish = weakref.finalize(self, _write, self._file, self._pending, self.path, last=True)
        header = json.dumps({"kind": "start", "steadystep": __version__}) + "\n"
        self._pending.append("\n" + header if torn else header)
        _write(self._file, self._pending, self.path)

    def record(self, outcome: Outcome) -> None:
        """One compact line; more around an incident and every `layers_every` steps."""
        signals = outcome.signals
        trouble = bool(outcome.diagnosis.findings) or not outcome.stepped
        if signals is not None:
            self._pending.append(_row(outcome, signals))
            if trouble or signals.step % self._layers_every == 0:
                self._pending.append(self._layers(signals))
        if trouble:
            self._pending.append(_incident(outcome))
            _tell(outcome)
        if trouble or len(self._pending) >= _FLUSH_EVERY:
            _write(self._file, self._pending, self.path)

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """A line of its own, written at once."""
        row = {"kind": "validation", "step": step, "metrics": {k: _number(float(v)) for k, v in metrics.items()}}
        self._pending.append(json.dumps(row) + "\n")
        _write(self._file, self._pending, self.path)

    def close(self) -> None:
        """Write what is left and close the file."""
        self._finish()

    def _layers(self, signals: Signals) -> str:
        line = {"kind": "layers", "step": signals.step, "norms": [_number(n) for n in signals.norms]}
        if signals.names != self._names:  # names are long and rarely change
            self._names = signals.names
            line["names"] = list(signals.names)
        return json.dumps(line) + "\n"


def _is_torn(path: Path) -> bool:
    """A crash left the last line without its end: what is appended must not stick to it."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def _write(file: IO[str], pending: list[str], path: Path, *, last: bool = False) -> None:
    lines = "".join(pending)
    pending.clear()
    if file.closed:
        return
    try:
        file.write(lines)
        file.flush()
    except OSError as error:
        logger.warning("run log %s stopped (%s); training goes on", path, error.strerror or error)
        last = True
    if last:
        with suppress(OSError):  # a full disk fails once more on what the file still buffers
            file.close()


def _row(outcome: Outcome, signals: Signals) -> str:
    if signals.healthy and not signals.metrics and not signals.scaled:
        # why by hand: json.dumps costs three times as much, on every step
        return (
            f'{{"step":{signals.step},"loss":{signals.loss:.9g},"norm":{signals.grad_norm:.9g},"lr":{signals.lr:.9g}'
            + (',"clipped":true}\n' if outcome.clipped else "}\n")
        )
    row: dict[str, object] = {
        "step": signals.step,
        "loss": _number(signals.loss),
        "norm": _number(signals.grad_norm),
        "lr": _number(signals.lr),
    }
    if outcome.clipped:
        row["clipped"] = True
    if signals.scaled:
        row["scale"] = signals.scale
    if signals.metrics:
        row["metrics"] = {name: _number(value) for name, value in signals.metrics.items()}
    return json.dumps(row, separators=(",", ":")) + "\n"


def _incident(outcome: Outcome) -> str:
    return (
        json.dumps(
            {
                "kind": "incident",
                "step": outcome.step,
                "stepped": outcome.stepped,
                "left_out": list(outcome.left_out),
                "diagnosis": json.loads(outcome.diagnosis.to_json()),
                "plan": json.loads(outcome.plan.to_json()),
            }
        )
        + "\n"
    )


def _number(value: float) -> float | str:
    if math.isfinite(value):
        return float(f"{value:.9g}")
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _tell(outcome: Outcome) -> None:
    routine = all(f.severity == "info" for f in outcome.diagnosis.findings) and bool(outcome.diagnosis.findings)
    logger.log(logging.INFO if routine else logging.WARNING, describe(outcome))
