"""A run on the screen while it goes on: in a terminal, or as a chart below a notebook cell.

In a log file: plain lines now and then, no control codes.
"""

import html
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, final

from rich.console import Console
from rich.live import Live

from steadystep.records import Incident
from steadystep.tracking import GradientSample, RunStart, StepRow, display, is_installed
from steadystep.tracking.display import DisplayedProgress
from steadystep.tracking.tracker import Row

_DRAW_EVERY_S = 0.5  # a drawing costs a few milliseconds
_LINE_EVERY_S = 10.0


@final
class Terminal:
    """Sink that draws loss, gradient norm, learning rate, speed, time left and incidents in a terminal or notebook.

    In a notebook it is one chart below the cell, redrawn as the run goes on. While it shows incidents, the logger has
    them at level INFO: the screen has each once.

    Args:
        console: where to draw. Default: standard error.
        total: steps in the whole run. Default: `training.total_steps`, if a schedule uses it.
        clock: returns seconds.
    """

    shows_incidents = True

    def __init__(
        self,
        console: Console | None = None,
        *,
        total: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._progress = DisplayedProgress(total)
        self._clock = clock
        self._title = ""
        self._live: Live | None = None
        self._drawn = -math.inf
        self._said = ""
        self._row = Row()
        self._cell: Any = None
        self._noticed: deque[Incident] = deque(maxlen=_MOST_NOTICED)

    def start(self, run: RunStart) -> None:
        """Reserve a part of the screen."""
        training = run.settings.get("training", {})
        if self._progress.total is None and training.get("lr_scheduler"):
            self._progress.total = training.get("total_steps")
        count = f", {run.parameters:,} parameters" if run.parameters else ""
        self._title = f"{display.harmless(run.name)}{count}" + (f", resumed at step {run.step:,}" if run.step else "")
        screen = self._console
        if screen.is_terminal and not screen.is_dumb_terminal and not screen.is_jupyter:
            self._live = Live(console=screen, auto_refresh=False)
            self._live.start()
        elif screen.is_jupyter and is_installed("IPython"):
            self._display: Any = import_module("IPython.display")
            self._cell = self._display.display(self._display.HTML(""), display_id=True)
        else:
            self._print(self._title)

    def step(self, row: StepRow) -> None:
        """Draw, if it is time."""
        now = self._clock()
        self._progress.step(row, now)
        if self._draws and now - self._drawn >= _DRAW_EVERY_S:
            self._drawn = now
            self._draw()
        elif not self._draws and now - self._drawn >= _LINE_EVERY_S:
            self._drawn = now
            self._say()

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics with the next drawing."""
        self._progress.validated(step, metrics)

    def layers(self, step: int, norms: Mapping[str, float]) -> None:
        """Do nothing: too much for a terminal."""

    def histograms(self, sample: GradientSample) -> None:
        """Do nothing: too much for a terminal."""

    def incident(self, incident: Incident) -> None:
        """Show a card; incidents like the last one are counted and summed up."""
        if incident.severity == "info":
            return
        self._progress.noticed(incident)
        if self._cell is not None:
            self._noticed.append(incident)
            self._draw()
            return
        kind = (incident.cause, incident.severity, incident.stepped, incident.restored)
        if self._row.goes_on(kind, incident.step):
            if self._row.is_due:
                self._sum_up()
            return
        self._sum_up()
        self._row.begin(kind, incident.step)
        if self._live is not None:
            self._console.print(display.card(incident))
            self._draw()
        else:
            for text in display.card_lines(incident):
                self._print(text)

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._sum_up()
        if self._draws:
            self._draw()
        else:
            self._say()
        if self._live is not None:
            self._live.stop()

    def _sum_up(self) -> None:
        if summary := self._row.summary():
            self._print(f"  {summary}")

    @property
    def _draws(self) -> bool:
        return self._live is not None or self._cell is not None

    def _draw(self) -> None:
        if self._cell is not None:
            self._cell.update(self._display.HTML(notebook_chart(self._progress, self._title, self._noticed)))
            return
        assert self._live is not None
        width, plain = self._console.width, self._console.options.ascii_only
        picture = display.live(self._progress, title=self._title, width=width, unicode=not plain)
        self._live.update(picture, refresh=True)

    def _say(self) -> None:
        said = display.line(self._progress)
        if said and said != self._said:
            self._print(said)
        self._said = said

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


_MOST_NOTICED = 5
_WIDTH, _HEIGHT = 300, 70


def notebook_chart(progress: DisplayedProgress, title: str, noticed: Sequence[Incident] = ()) -> str:
    """Return the run as HTML for a notebook: three small charts, the numbers in a line, the last incidents."""
    row = progress.row
    now = (row.loss, row.grad_norm, row.lr) if row is not None else (math.nan,) * 3
    trails = (progress.loss.values, progress.norm.values, progress.lr.values)
    names = ("loss", "gradient norm", "learning rate")
    charts = "".join(_chart(*one) for one in zip(names, trails, now, strict=True))
    cards = "".join(
        f"<div>step {incident.step}: <b>{html.escape(incident.cause)}</b>, {html.escape(incident.done)}. "
        f"{html.escape(incident.evidence)}</div>"
        for incident in noticed
    )
    said = html.escape(f"{title}: {display.line(progress)}")
    return f'<div style="font:13px sans-serif"><div>{said}</div><div style="display:flex">{charts}</div>{cards}</div>'


def _chart(name: str, values: Sequence[float], now: float) -> str:
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    spread = high - low or 1.0
    points = " ".join(
        f"{i / max(len(values) - 1, 1) * _WIDTH:.1f},{_HEIGHT - 4 - (value - low) / spread * (_HEIGHT - 8):.1f}"
        for i, value in enumerate(values)
    )
    line = f'<polyline points="{points}" fill="none" stroke="#3b6fb6" stroke-width="1.5"/>'
    text = f"{name} {now:.4g} (lowest {min(low, now):.3g}, highest {max(high, now):.3g})"
    return (
        f'<figure style="margin:4px 12px 4px 0"><figcaption style="opacity:.7">{text}</figcaption>'
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{name}">{line}</svg></figure>'
    )
