"""The list of runs: one walk through a folder, and a run in one row.

The walk never leaves the folder, not by a symbolic link either.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, final

import numpy as np

from steadystep._utils import QUIET_S as QUIET_S
from steadystep._utils import RunStatus, run_status
from steadystep._utils.text import dotted, logger
from steadystep.pages.charts import is_wide, thin
from steadystep.pages.incident_groups import Headline, gravest, incident_groups
from steadystep.runs.run import Run, Series

OUR_LOG = "run.jsonl"
_STATE = "trainer_state.json"
_DEEPEST = 8
_MOST = 2000
_MOST_FOLDERS = 20_000  # a walk through these takes a second or two
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})
_HEAD_BYTES = 4096


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """One run: what it is called here, what to open, and the files that change when it does."""

    key: str
    path: Path
    files: tuple[Path, ...]
    ours: bool

    def stamp(self) -> tuple[int, int]:
        """Bytes and the time of the last change; (0, 0) when it is gone."""
        try:
            states = [file.stat() for file in self.files]
        except OSError:
            return (0, 0)
        return sum(s.st_size for s in states), max(s.st_mtime_ns for s in states)


def places(root: Path) -> tuple[RunFolder, ...]:
    """All runs below `root`, a run of steadystep being a leaf."""
    real = root.resolve()
    found: list[RunFolder] = []
    seen: set[Path] = set()
    for place in _visit(real, real, seen, 0):
        found.append(place)
        if len(found) >= _MOST:
            break
    if len(found) >= _MOST or len(seen) >= _MOST_FOLDERS:
        _say_cut(real)
    return tuple(found)


def _visit(folder: Path, root: Path, seen: set[Path], depth: int) -> Iterator[RunFolder]:
    real = _resolved(folder)
    if depth > _DEEPEST or real is None or real in seen or not real.is_relative_to(root):
        return
    if len(seen) >= _MOST_FOLDERS:
        return
    seen.add(real)
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    files = {e.name: folder / e.name for e in entries if _is_file_inside(e, root)}
    if OUR_LOG in files:
        yield _place(folder, root, folder, files[OUR_LOG], ours=True)
        return
    state = files.get(_STATE) or _last_state(folder, root)
    if state is not None:
        yield _place(folder, root, state, state)
        return
    events = [path for name, path in files.items() if "tfevents" in name]
    if events:
        yield RunFolder(key=_key(folder, root), path=folder, files=tuple(events), ours=False)
    for name, path in files.items():
        if name.endswith((".csv", ".tsv")) and _has_loss(path):
            yield _place(path, root, path, path)
    for entry in entries:
        if _is_folder(entry) and not entry.name.startswith(".") and entry.name not in _SKIPPED:
            yield from _visit(folder / entry.name, root, seen, depth + 1)


def _place(named: Path, root: Path, path: Path, file: Path, *, ours: bool = False) -> RunFolder:
    return RunFolder(key=_key(named, root), path=path, files=(file,), ours=ours)


def _key(path: Path, root: Path) -> str:
    name = root.name if path == root else str(path.relative_to(root))
    return os.fsencode(name).decode("utf-8", errors="replace")  # a name on disk is bytes, and a page is text


@cache  # once, not at every walk
def _say_cut(root: Path) -> None:
    logger.warning(
        "%s: more than %d runs or %d folders; the rest is not shown: choose a subfolder",
        root,
        _MOST,
        _MOST_FOLDERS,
    )


def _resolved(path: Path) -> Path | None:
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # links that lead to themselves
        return None


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_file_inside(entry: "os.DirEntry[str]", root: Path) -> bool:
    try:
        if not entry.is_file():
            return False
        real = _resolved(Path(entry.path)) if entry.is_symlink() else root
        return real is not None and real.is_relative_to(root)
    except OSError:
        return False


def _last_state(folder: Path, root: Path) -> Path | None:
    """Each checkpoint of the Hugging Face Trainer holds the log up to there; the last one holds all."""
    saved = [p for p in folder.glob(f"checkpoint-*/{_STATE}") if re.fullmatch(r"checkpoint-\d+", p.parent.name)]
    inside = [path for path in saved if (real := _resolved(path)) and real.is_relative_to(root) and real.is_file()]
    return max(inside, key=lambda path: int(path.parent.name[11:]), default=None)


def _has_loss(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b"loss" in file.read(_HEAD_BYTES).split(b"\n", 1)[0].lower()
    except OSError:
        return False


_STOPS = 48
_BYTES = 512  # a few lines of steps
_LARGEST_STEP = 2**62


def glance(path: Path) -> Series:
    """The loss at about fifty places of a run log, the last one included; empty when nothing there makes sense."""
    steps: list[int] = []
    losses: list[float] = []
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            for stop in range(_STOPS + 1):
                file.seek(max(0, (size - _BYTES) * stop // _STOPS))
                for line in reversed(file.read(_BYTES).split(b"\n")[1:-1]):
                    if (found := _row(line)) is not None:
                        if not steps or found[0] > steps[-1]:
                            steps.append(found[0])
                            losses.append(found[1])
                        break
    except OSError:
        pass
    return Series(np.array(steps, dtype=np.int64), np.array(losses, dtype=np.float64))


def _row(line: bytes) -> tuple[int, float] | None:
    try:
        row = json.loads(line)
        step, loss = row["step"], float(row["loss"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return (step, loss) if type(step) is int and 0 <= step < _LARGEST_STEP else None


_WIDTH = 120
_SPARK = 36  # columns of a curve in the size of a word
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_MOST_HPARAMS = 40


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Spark:
    """A curve in the size of a word."""

    heights: str = ""
    """One digit of base 36 for each point, a dot where the curve is broken."""
    marks: tuple[tuple[float, str], ...] = ()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What the list shows about a run. Where only a glance was taken so far, `known` is False."""

    key: str
    name: str
    changed: float
    known: bool = False
    ended: bool | None = None
    end: str = ""
    process: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    steps: int = 0
    loss: float | None = None
    val_loss: float | None = None
    interventions: int = 0
    incidents: int = 0
    severity: str = ""
    said: str = ""
    healthy: bool | None = None
    problem: str = ""
    """Why it cannot be read."""
    spark: Spark = Spark()
    hparams: tuple[tuple[str, float | str], ...] = ()

    def state(self, now: float | None = None) -> RunStatus:
        """Running, finished, stopped by error or guard, stale (silent, and it never said that it ended), or idle."""
        return run_status(self.ended, self.end, self.process, self.changed, now)


@np.errstate(all="ignore")
def summary(key: str, run: Run, verdict: Headline | None, changed: float) -> RunSummary:
    """From a whole reading."""
    told = incident_groups(run)
    last = int(run.loss.steps[-1]) if len(run.loss) else 0
    marks = tuple((round(_WIDTH * e.first / max(last, 1), 1), e.severity) for e in told if e.acted)
    return RunSummary(
        key=key,
        name=key,
        changed=changed,
        known=True,
        ended=run.ended,
        end=run.end,
        process=run.process,
        source=run.source,
        steps=run.steps,
        loss=run.final_loss,
        val_loss=run.last_validation,
        interventions=run.num_interventions,
        incidents=run.num_incidents,
        severity=gravest(run.incidents),
        said=verdict.said if verdict else "",
        healthy=verdict.healthy if verdict else None,
        spark=Spark(heights=spark_heights(run.loss), marks=marks[-40:]),
        hparams=tuple((str(name), _plain(value)) for name, value in dotted(run.hparams))[:_MOST_HPARAMS],
    )


def _plain(value: object) -> float | str:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return value
    return str(value)[:80]


@np.errstate(all="ignore")
def spark_heights(series: Series) -> str:
    """A curve in at most 80 digits of base 36; logarithmic where it spans orders of magnitude."""
    curve = thin(series, buckets=_SPARK)
    values = np.log10(np.abs(curve.values)) if is_wide(series) else curve.values
    finite = np.isfinite(values)
    if not finite.any():
        return ""
    values = values / max(float(np.abs(values[finite]).max()), 1e-300)
    low, high = float(values[finite].min()), float(values[finite].max())
    levels = np.where(finite, (values - low) / (high - low or 1.0) * 35, 0.0).round().astype(int)
    return "".join(_DIGITS[level] if ok else "." for level, ok in zip(levels, finite, strict=True))
