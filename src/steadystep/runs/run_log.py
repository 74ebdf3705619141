"""Reads a run log: all of it, or what was added since the last look. Needs no torch; forgives what a crash leaves."""

import math
import os
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, final

import numpy as np

from steadystep._utils.numbers import from_json, json_lines
from steadystep._utils.text import count, must_end
from steadystep.errors import ConfigError
from steadystep.records import Incident
from steadystep.runs import duration
from steadystep.runs.gathering import Column, LayerRows
from steadystep.runs.run import Run, Series
from steadystep.tracking.log_format import LARGEST_STEP, count_of, float_of, incident_of, step_of


@final
class Ledger:
    """What the lines so far say. A step that comes again takes the place of all that came at it and after it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._steps = array("q")
        self._losses, self._norms, self._rates = array("d"), array("d"), array("d")
        self._clipped = array("q")
        self._scale = Column()
        self._metrics: dict[str, Column] = {}
        self._validation: dict[str, Column] = {}
        self._layers, self._updates, self._logits = LayerRows(), LayerRows(), LayerRows()
        self._incidents: list[Incident] = []
        self._restarts: list[int] = []
        self._start: Mapping[str, Any] = {}
        self._end: Mapping[str, Any] | None = None
        self._verdict = self._fault = ""
        self._header_passed = False
        self._last = -1
        self._unwritten = 0
        self.known = 0
        """Lines that made sense."""
        self.junk = self.unknown = self.repeated = 0

    def take(self, lines: Iterable[Any]) -> None:
        """Lines of the log, as JSON gave them; a wrong one is counted and leaves no trace."""
        for line in lines:
            try:
                if "kind" not in line:
                    self._row(line)
                elif (take := _KINDS.get(line["kind"])) is not None:
                    take(self, line)
                else:
                    self.unknown += 1
                    continue
            except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
                self.junk += 1
            else:
                self.known += 1

    def _row(self, line: Mapping[str, Any]) -> None:
        step, loss, norm, lr = line["step"], line["loss"], line["norm"], line["lr"]
        known = type(step) is int and 0 <= step < LARGEST_STEP
        if not (known and type(loss) is float and type(norm) is float and type(lr) is float):
            step, loss, norm, lr = step_of(step), from_json(loss), from_json(norm), from_json(lr)
        if len(line) == 4 and step > self._last and not self._header_passed:  # nearly all of them
            self._append(step, loss, norm, lr)
            return
        metrics = {str(k): from_json(v) for k, v in line["metrics"].items()} if "metrics" in line else {}
        scale = from_json(line["scale"]) if "scale" in line else None
        if step <= self._last or self._header_passed:
            self._go_on_at(step)
        self._append(step, loss, norm, lr)
        if line.get("clipped"):
            self._clipped.append(step)
        if scale is not None:
            self._scale.cut(step)
            self._scale.append(step, scale)
        for name, value in metrics.items():
            self._metrics.setdefault(name, Column()).append(step, value)

    def _append(self, step: int, loss: float, norm: float, lr: float) -> None:
        self._steps.append(step)
        self._losses.append(loss)
        self._norms.append(norm)
        self._rates.append(lr)
        self._last = step

    def _go_on_at(self, step: int) -> None:
        """Another process goes on, or the same one from an earlier state: later lines count."""
        other_process, self._header_passed = self._header_passed, False
        place = bisect_left(self._steps, step)
        self.repeated += len(self._steps) - place
        for rows in (self._steps, self._losses, self._norms, self._rates):
            del rows[place:]
        del self._clipped[bisect_left(self._clipped, step) :]
        for column in (self._scale, *self._metrics.values()):
            column.cut(step)
        for column in self._validation.values():
            column.cut(step + 1)  # a validation at `step` was made before that step was tried
        if other_process and self._scale.steps:
            self._scale.append(step, math.nan)  # it need not have a scale at all
        for layers in (self._layers, self._updates, self._logits):
            layers.cut(step)
        self._incidents = [i for i in self._incidents if i.step < step]
        self._restarts = [at for at in self._restarts if at < step]
        if self._steps:
            self._restarts.append(step)

    def _started(self, line: Mapping[str, Any]) -> None:
        if not all(isinstance(line.get(key, {}), Mapping) for key in ("settings", "hparams", "process")):
            raise TypeError
        self._start, self._end, self._verdict, self._fault = line, None, "", ""
        self._header_passed = bool(self._steps)
        self._layers.names = self._updates.names = ()

    def _layers_line(self, line: Mapping[str, Any]) -> None:
        self._layers.append(step_of(line["step"]), line.get("names"), line["norms"])

    def _probe(self, line: Mapping[str, Any]) -> None:
        self._updates.append(step_of(line["step"]), line.get("names"), line["ratios"])
        if "logits" in line:
            self._logits.append(line["step"], line["attentions"], line["logits"])

    def _validated(self, line: Mapping[str, Any]) -> None:
        step = step_of(line["step"])
        for name, value in [(str(k), from_json(v)) for k, v in line["metrics"].items()]:
            column = self._validation.setdefault(name, Column())
            column.cut(step)
            column.append(step, value)

    def _incident(self, line: Mapping[str, Any]) -> None:
        step_of(line["step"])
        self._incidents.append(incident_of(line, self._folder))
        self._unwritten += count_of(line.get("unwritten"))

    def _believed(self, line: Mapping[str, Any]) -> None:
        self._verdict = f"{line['cause']}: {line.get('evidence', '')}"
        self._fault = str(line.get("fault") or "")

    def _ended(self, line: Mapping[str, Any]) -> None:
        self._end = line
        self._unwritten += count_of(line.get("unwritten"))

    def as_run(self, notes: tuple[str, ...]) -> Run:
        """The run so far."""
        steps = np.array(self._steps, dtype=np.int64)
        return Run(
            name=self._folder.resolve().name or "run",
            path=self._folder,
            source="steadystep",
            loss=Series(steps, np.array(self._losses)),
            grad_norm=Series(steps, np.array(self._norms)),
            lr=Series(steps, np.array(self._rates)),
            scale=self._scale.carried_on(steps),
            metrics={name: column.series() for name, column in self._metrics.items() if column.steps},
            validation={name: column.series() for name, column in self._validation.items() if column.steps},
            clipped=np.array(self._clipped, dtype=np.int64),
            incidents=tuple(self._incidents),
            layers=self._layers.norms(),
            updates=self._updates.norms(),
            logits=self._logits.norms(),
            restarts=tuple(self._restarts),
            settings=self._start.get("settings", {}),
            notes=notes + self._notes(),
            ended=self._end is not None,
            end="" if self._end is None else str(self._end.get("how", "")),
            error="" if self._end is None else str(self._end.get("error", "")),
            verdict=self._verdict,
            fault=self._fault,
            began=float_of(self._start.get("time")),
            seconds=duration(self._start, self._end),
            parameters=self._start["parameters"] if type(self._start.get("parameters")) is int else None,
            hparams=self._start.get("hparams", {}),
            process=self._start.get("process", {}),
        )

    def _notes(self) -> tuple[str, ...]:
        said = []
        if self.junk:
            said.append(f"{count(self.junk, 'line')} could not be read and were skipped (a crash can cut the last)")
        if self.unknown:
            said.append(f"{count(self.unknown, 'line')} of an unknown kind were skipped")
        if self.repeated:
            said.append(f"{self.repeated} steps were repeated after a restart; the later ones are shown")
        if self._unwritten:
            said.append(f"{self._unwritten:,} more incidents were counted but not written: the log was full")
        return tuple(said)


_KINDS = {
    "start": Ledger._started,
    "layers": Ledger._layers_line,
    "probe": Ledger._probe,
    "validation": Ledger._validated,
    "incident": Ledger._incident,
    "verdict": Ledger._believed,
    "end": Ledger._ended,
}


NAME = "run.jsonl"
_CHUNK, _LONGEST_LINE = 1 << 20, 1 << 26  # bytes; rows as Python objects take ten times as much, for a moment
_HEADER = b'{"kind": "start"'  # what a log begins with


def read(path: str | Path) -> Run:
    """Read the run whose folder, or whose `run.jsonl`, is `path`.

    Raises:
        ConfigError: there is no run log here, or nothing in it.
    """
    follower = Follower(path)
    follower.update()
    if follower.is_empty:
        raise ConfigError(f"{follower.path}: the log is empty")
    return follower.run


@final
class Follower:
    """Reads a run log while it grows. For one thread at a time.

    Args:
        path: the log, or the folder that holds it.
    """

    def __init__(self, path: str | Path) -> None:
        given = Path(path)
        self.path = given / NAME if given.is_dir() else given
        self._forget()

    def _forget(self) -> None:
        self._ledger = Ledger(self.path.parent)
        self._tail = b""
        self._offset = 0
        self._identity: tuple[int, int] | None = None
        self._run: Run | None = None
        self._dropped = 0

    @property
    def is_empty(self) -> bool:
        """Whether no line has been read yet."""
        return not self._ledger.known

    @property
    def run(self) -> Run:
        """The run as of the last update."""
        if self._run is None:
            notes: tuple[str, ...] = ("the log is empty",) if not self._ledger.known else ()
            if self._dropped:
                notes += (f"{self._dropped} lines longer than {_LONGEST_LINE >> 20} MB were skipped",)
            self._run = self._ledger.as_run(notes)
        return self._run

    def update(self) -> bool:
        """Read what is new; return whether there was anything. A log that was replaced is read from its beginning.

        Raises:
            ConfigError: the file is not there, cannot be read, or is something else.
        """
        try:
            if self.path.exists():
                must_end(self.path)
            with self.path.open("rb") as file:
                return self._read(file)
        except FileNotFoundError:
            raise ConfigError(f"{self.path}: no run log here (a run folder contains {NAME})") from None
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read ({error.strerror or error})") from None

    def _read(self, file: IO[bytes]) -> bool:
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino)
        if self._identity not in (None, identity) or status.st_size < self._offset:
            self._forget()
        self._identity = identity
        file.seek(self._offset)
        changed = False
        while chunk := file.read(_CHUNK):
            self._offset += len(chunk)
            *lines, self._tail = (self._tail + chunk).split(b"\n")
            if len(self._tail) > _LONGEST_LINE:
                self._tail, self._dropped = b"", self._dropped + 1
            if lines:
                self._ledger.take(json_lines([line for line in lines if line]))
                changed, self._run = True, None
            self._check()
        return changed

    def _check(self) -> None:
        """Something else, such as another tool's log: not one line of it makes sense."""
        ledger = self._ledger
        begun = self._tail and not _HEADER.startswith(self._tail[: len(_HEADER)])
        if not ledger.known and (ledger.junk or ledger.unknown or begun or self._dropped):
            self._forget()
            raise ConfigError(f"{self.path}: not a run log of steadystep (`steadystep diagnose` reads other logs too)")
