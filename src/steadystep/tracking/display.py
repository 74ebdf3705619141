"""How a run looks in a terminal: a block that is drawn again and again, lines for a log file, cards for incidents."""

import math
from collections import Counter, deque
from collections.abc import Mapping
from datetime import timedelta
from typing import final

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from steadystep._utils.text import number
from steadystep.records import Incident
from steadystep.tracking import StepRow

_WINDOW_S = 30.0  # over which the speed is measured
_POINTS = 64


@final
class Trail:
    """A whole curve in at most 64 points: each time it is full, neighbours become one, and the higher one stays."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._each = 1
        self._seen = 0

    def add(self, value: float) -> None:
        """One more."""
        if not math.isfinite(value):
            return
        if self._seen % self._each == 0:
            self.values.append(value)
        else:
            self.values[-1] = max(self.values[-1], value)
        self._seen += 1
        if len(self.values) > _POINTS:
            pairs = zip(self.values[::2], [*self.values[1::2], -math.inf], strict=False)
            self.values = [max(pair) for pair in pairs]
            self._each *= 2
            self._seen = len(self.values) * self._each


@final
class DisplayedProgress:
    """Numbers of now, trails of then."""

    def __init__(self, total: int | None = None) -> None:
        self.total = total
        self.row: StepRow | None = None
        self.loss, self.norm, self.lr = Trail(), Trail(), Trail()
        self.validation: float | None = None
        self.best: tuple[float, int] | None = None
        self.incidents: Counter[str] = Counter()
        self.last: Incident | None = None
        self._times: deque[tuple[float, int]] = deque()

    def step(self, row: StepRow, now: float) -> None:
        """One more step, at that time."""
        self.row = row
        self.loss.add(row.loss)
        self.norm.add(row.grad_norm)
        self.lr.add(row.lr)
        self._times.append((now, row.step))
        while len(self._times) > 2 and self._times[1][0] < now - _WINDOW_S:
            self._times.popleft()

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """How it went."""
        self.validation = metrics.get("val_loss")
        if self.validation is not None and (self.best is None or self.validation < self.best[0]):
            self.best = (self.validation, step)

    def noticed(self, incident: Incident) -> None:
        """Count it by cause, unless it is routine or continues the last one: as `Run.num_incidents` does."""
        if incident.is_routine:
            return
        if self.last is None or not incident.continues(self.last):
            self.incidents[incident.cause] += 1
        self.last = incident

    @property
    def done(self) -> int:
        """Steps so far, those before a resume too."""
        return 0 if self.row is None else self.row.step + 1

    @property
    def speed(self) -> float | None:
        """Steps per second lately."""
        if len(self._times) < 2 or self._times[-1][0] <= self._times[0][0]:
            return None
        (then, first), (now, last) = self._times[0], self._times[-1]
        return max(0.0, (last - first) / (now - then))

    @property
    def seconds_left(self) -> float | None:
        """Where the end is known."""
        speed = self.speed
        return None if self.total is None or not speed else max(0, self.total - self.done) / speed


_BLOCKS = "▁▂▃▄▅▆▇█"
_COLOURS = {"info": "blue", "warn": "yellow", "act": "dark_orange", "critical": "red"}
_WIDEST_TRAIL = 32


def live(progress: DisplayedProgress, *, title: str, width: int, unicode: bool = True) -> RenderableType:
    """Five or six lines, whatever the width."""
    room = min(_WIDEST_TRAIL, max(0, width - 34)) if unicode else 0
    return Group(
        Text(title, style="bold", no_wrap=True, overflow="ellipsis"), _bar(progress, width), _numbers(progress, room)
    )


def line(progress: DisplayedProgress) -> str:
    """The same in one line of plain text."""
    row = progress.row
    if row is None:
        return ""
    said = [f"step {progress.done}" + (f"/{progress.total}" if progress.total else "")]
    said += [f"loss {number(row.loss)}", f"norm {row.grad_norm:.3g}", f"lr {row.lr:.2e}"]
    if progress.speed is not None:
        said.append(_speed(progress.speed))
    if progress.seconds_left is not None:
        said.append(f"{_duration(progress.seconds_left)} left")
    if progress.validation is not None:
        said.append(f"validation {number(progress.validation)}")
    if progress.incidents:
        said.append(f"{_counted(progress.incidents.total(), 'incident')}")
    return "  ".join(said)


def card(incident: Incident) -> RenderableType:
    """One incident, in a frame."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, text in _parts(incident):
        table.add_row(name, Text(text))
    colour = _COLOURS[incident.severity]
    title = Text(f"step {incident.step}: {harmless(incident.cause)}", style=f"bold {colour}")
    return Panel(table, title=title, title_align="left", border_style=colour, padding=(0, 1))


def card_lines(incident: Incident) -> list[str]:
    """The same as plain text."""
    head = f"! step {incident.step}: {harmless(incident.cause)} ({incident.severity})"
    return [head, *(f"    {name:<8} {text}" for name, text in _parts(incident))]


def _parts(incident: Incident) -> list[tuple[str, str]]:
    said = {"evidence": incident.evidence, "done": incident.done, "origin": incident.origin, "try": incident.advice}
    return [(name, harmless(text)) for name, text in {**said, "bundle": incident.bundle}.items() if text]


def harmless(text: str) -> str:
    """Without control codes: a name must not move the cursor."""
    return "".join(c if c.isprintable() else " " for c in text)


def _bar(progress: DisplayedProgress, width: int) -> RenderableType:
    done, total = progress.done, progress.total
    table = Table.grid(padding=(0, 2))
    cells: list[RenderableType] = []
    if total:
        size = max(8, min(32, width - 50))
        cells.append(ProgressBar(total=total, completed=min(done, total), width=size, complete_style="green"))
    cells.append(Text(f"{done:,}/{total:,} steps" if total else f"{done:,} steps"))
    if progress.speed is not None:
        cells.append(Text(_speed(progress.speed)))
    if progress.seconds_left is not None:
        cells.append(Text(f"{_duration(progress.seconds_left)} left", style="bold"))
    table.add_row(*cells)
    return table


def _numbers(progress: DisplayedProgress, room: int) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right", min_width=10)
    table.add_column(style="cyan", no_wrap=True)
    row = progress.row
    if row is not None:
        table.add_row("loss", Text(number(row.loss), style="bold"), _trail(progress.loss.values, room))
        table.add_row("grad norm", f"{row.grad_norm:.3g}", _trail(progress.norm.values, room))
        table.add_row("learning rate", f"{row.lr:.2e}", _trail(progress.lr.values, room))
    if progress.validation is not None and progress.best is not None:
        best = f"best {number(progress.best[0])} before step {progress.best[1]:,}"
        table.add_row("validation", number(progress.validation), Text(best, style="default"))
    count = progress.incidents.total()
    if progress.last is not None:
        last = Text(
            f"last: step {progress.last.step:,}, {harmless(progress.last.cause)}",
            style=_COLOURS[progress.last.severity],
        )
        table.add_row("incidents", Text(str(count), style="bold"), last)
    else:
        table.add_row("incidents", "0", Text("none", style="green"))
    return table


def _trail(values: list[float], room: int) -> str:
    """A curve in block characters; each stands for the highest value of its part."""
    if not values or room < 4:
        return ""
    size = -(-len(values) // room)
    heights = [max(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(heights), max(heights)
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((h - low) / (high - low) * top) if high > low else 0] for h in heights)


def _speed(speed: float) -> str:
    return (
        f"{speed:.0f} steps/s"
        if speed >= 10
        else (f"{speed:.2g} steps/s" if speed >= 1 else f"{1 / speed:.2g} s/step" if speed > 0 else "stalled")
    )


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(min(seconds, 1e8))))


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count != 1 else ''}"
