"""What a training script prints, as a run: lines are read as they stream by, each rank for itself.

A line that holds a loss, an accuracy or a reward becomes a row. Steps, epochs and progress bars on lines of their own
apply to the rows that follow. Everything else is passed over.
"""

import re
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TextIO, final

import numpy as np

from steadystep.errors import ConfigError
from steadystep.runs.gathering import Gathering, encoding_of, number_in_cell
from steadystep.runs.run import Run, Source
from steadystep.runs.table import LogTable, is_loss, role_of, to_run
from steadystep.runs.text_line import Line, is_measure, plain_text, read_line

_LONGEST = 1 << 14  # characters: a longer line is cut into pieces
_LOOK = 4000  # lines in which a log shows that it is one
_RECENT = 64  # rows in which a second copy is looked for: every rank prints its own
_PRESENT = 3  # steps that processes are apart; what comes back from further is a resumed run
_MOST_RANKS = 64
_MOST_BARS = 6
_MOST_VALUES = 48  # of one line
_HALF = 0.5
_TELLS = re.compile(
    r"loss|nll|xent|acc|rew|score|error|step|iter|epoch|update|norm|lr|rate|mse|ce\b|s:\d|\d/ *\d|^ *\||^ *\d+ *[|:]",
    re.IGNORECASE,
)
_CELLS = re.compile(r"\s*[|,;\t]\s*|\s{2,}")
_OF = "\x00of "  # the column of a progress bar; no log has such a name


@final
@dataclass(slots=True)
class _Rank:
    """The rows of one rank, and what the lines before apply to the next one."""

    rows: Gathering = field(default_factory=Gathering)
    steps: "array[float]" = field(default_factory=lambda: array("d"))
    named: Counter[str] = field(default_factory=Counter)
    losses: int = 0
    stale: int = 0
    """Losses that came a second time under a step of an earlier line."""
    copies: int = 0
    step: float = np.nan
    counter: str = ""
    """What counts the steps on lines of their own; another count among them is only a metric."""
    epoch: float = np.nan
    bars: dict[float, float] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    recent: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    present: deque[float] = field(default_factory=lambda: deque(maxlen=_PRESENT))

    def add(self, line: Line) -> None:
        """One line that says something."""
        if line.epoch is not None:
            self.epoch = line.epoch
        if line.bar is not None and (len(self.bars) < _MOST_BARS or line.bar[1] in self.bars):
            self.bars[line.bar[1]] = line.bar[0]
        if line.step is not None and (line.measures or (line.sure and self.counter in ("", line.step_name))):
            self.counter = self.counter if line.measures else line.step_name
            self.step = line.step
            self.seen.clear()
        kept = line.values if line.measures or (line.step is not None and line.sure) else self._about_training(line)
        if kept and (line.measures or self.step == self.step) and not self._is_copy(line):
            self._put(line, kept)

    def _about_training(self, line: Line) -> dict[str, float]:
        """Of a line without a loss or a step: a norm or a rate, once a step is known; of a table all."""
        if line.listed:
            return line.values
        return {name: value for name, value in line.values.items() if role_of(name) in ("grad_norm", "lr")}

    def _is_copy(self, line: Line) -> bool:
        if line.step is None or not line.measures:
            return False
        key = (line.step, *(value for name, value in line.values.items() if is_measure(name)))
        if key in self.recent and line.step in self.present:
            self.copies += 1
            return True
        self.recent.append(key)
        if line.step not in self.present:
            self.present.append(line.step)
        return False

    def _put(self, line: Line, kept: Mapping[str, float]) -> None:
        losses = [name for name in kept if is_measure(name)]
        self.losses += bool(losses)
        if line.step is None:
            self.stale += any(name in self.seen for name in losses)
        else:
            self.named[line.step_name] += bool(losses)
        self.seen.update(losses)
        row = dict(islice(kept.items(), _MOST_VALUES))
        row.setdefault("epoch", self.epoch)
        row |= {f"{_OF}{whole:.0f}": at for whole, at in self.bars.items()}
        self.rows.add({name: value for name, value in row.items() if name != "epoch" or value == value})
        self.steps.append(self.step)


def read_text(path: Path, columns: Mapping[str, str]) -> Run:
    """The run in what a training script printed.

    Raises:
        ConfigError: no line holds a loss.
    """
    ranks, lines, dicts = _gathered(path)
    best = max(sorted(ranks, key=_order), key=lambda rank: ranks[rank].losses, default=None)
    if best not in ranks or not ranks[best].losses:
        raise ConfigError(
            f"{path}: no loss found in {lines:,} lines; a line should hold one as `loss: 2.31`, `loss=2.31` or "
            "`loss 2.31`"
        )
    table = _table(ranks[best])
    speaking = [rank for rank, one in ranks.items() if one.losses and rank is not None]
    if len(speaking) > 1:
        table.notes.append(f"{len(speaking)} ranks print losses: those of rank {best} are read")
    if ranks[best].copies:
        table.notes.append(f"{ranks[best].copies} repeated lines were skipped")
    source: Source = "transformers" if dicts > _HALF * ranks[best].losses else "text"
    return to_run(table, name=path.stem, path=path, source=source, asked=columns)


def is_text_log(path: Path) -> bool:
    """Whether one of the first lines holds a loss with its name."""
    with path.open(encoding=encoding_of(path), errors="replace") as file:
        for text in islice(_lines(file), _LOOK):
            if _TELLS.search(text) and any(map(is_loss, read_line(text).values)):
                return True
    return False


def _order(rank: int | None) -> int:
    return -1 if rank is None else rank


def _gathered(path: Path) -> tuple[dict[int | None, _Rank], int, int]:
    """The ranks, the number of lines, and how many are dictionaries as the Hugging Face Trainer prints them."""
    ranks: dict[int | None, _Rank] = {}
    count = dicts = 0
    header: list[str] = []
    with path.open(encoding=encoding_of(path), errors="replace") as file:
        for text in _lines(file):
            count += 1
            if not _TELLS.search(text) and not header:
                continue
            line = read_line(text)
            if not line.measures and line.step is None:
                header, line = _from_table(text, header, line)
            if line.rank not in ranks and len(ranks) >= _MOST_RANKS:
                continue
            if line.values or line.epoch is not None or line.bar is not None:
                ranks.setdefault(line.rank, _Rank()).add(line)
                if (
                    line.rank == 0 and not line.measures
                ):  # DeepSpeed prints the rate with a rank, scripts the loss without
                    ranks.setdefault(None, _Rank()).add(line)
                dicts += "'loss': " in text and "'epoch': " in text
    return ranks, count, dicts


def _lines(file: TextIO) -> Iterator[str]:
    """Lines without terminal codes; a progress bar that overwrites itself is many lines."""
    for text in iter(lambda: file.readline(_LONGEST), ""):
        for part in plain_text(text).split("\b") if "\b" in text else (plain_text(text),):
            if part.strip():
                yield part.rstrip("\n")


def _from_table(text: str, header: list[str], line: Line) -> tuple[list[str], Line]:
    """A row under a header of names, such as fastai prints; the header is remembered."""
    cells = [cell for cell in _CELLS.split(text.strip(" |\t\n")) if cell]
    if len(cells) < 2:
        cells = text.split()
    numbers = [number_in_cell(cell) for cell in cells]
    if header and len(cells) == len(header) and sum(value is not None for value in numbers) * 2 >= len(cells):
        return header, _row(header, numbers)
    if len(cells) > 1 and not any(value is not None for value in numbers) and any(map(is_loss, cells)):
        return cells, line
    return header, line


def _row(header: list[str], numbers: Iterable[float | None]) -> Line:
    row = Line()
    for name, value in zip(header, numbers, strict=True):
        if value is None:
            continue
        if role_of(name) == "step" and row.step is None:
            row.step, row.step_name, row.sure = value, name, True
        row.values.setdefault(name, value)
        row.measures = row.measures or is_measure(name)
    if row.step_name.lower() == "epoch":
        row.epoch, row.step, row.step_name = row.step, None, ""
    return row


def _table(rank: _Rank) -> LogTable:
    table = rank.rows.table()
    bars = {name: table.columns.pop(name) for name in list(table.columns) if name.startswith(_OF)}
    steps = np.frombuffer(rank.steps, dtype=np.float64)
    if np.isfinite(steps).any() and rank.stale <= _HALF * rank.losses:
        table.steps, table.step_name = steps, max(rank.named, key=lambda name: rank.named[name], default="step")
        return table
    for name in [name for name in table.columns if role_of(name) == "step" and name != "epoch"]:
        del table.columns[name]  # a step that was named now and then is no count
    best, most = "", 0
    for name, (_, values) in bars.items():
        moves = int(np.count_nonzero(np.diff(values)))
        if moves > most:
            best, most = name, moves
    if best and most >= _HALF * (rank.losses - 1):
        rows, values = bars[best]
        table.steps = np.full(table.rows, np.nan)
        table.steps[rows] = values
        table.step_name, table.whole = "progress bar", float(best.removeprefix(_OF))
    return table
