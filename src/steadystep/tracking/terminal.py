"""A run in a terminal while it goes on. In a log file: plain lines now and then, no control codes."""

import math
import time
from collections.abc import Callable, Mapping
from typing import final

from rich.console import Console
from rich.live import Live

from steadystep.records import Incident
from steadystep.tracking import display
from steadystep.tracking.display import Progress
from steadystep.tracking.sink import GradientSample, RunStart, StepRow
from steadystep.tracking.tracker import Row

_DRAW_EVERY_S = 0.5  # a drawing costs a few milliseconds
_LINE_EVERY_S = 10.0


@final
class Terminal:
    """Sink that draws loss, gradient norm, learning rate, speed, time left and incidents in a terminal.

    Args:
        console: where to draw. Default: standard error.
        total: steps in the whole run. Default: `training.total_steps`, if a schedule uses it.
        clock: returns seconds.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        total: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._progress = Progress(total)
        self._clock = clock
        self._title = ""
        self._live: Live | None = None
        self._drawn = -math.inf
        self._said = ""
        self._row = Row()

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
        else:
            self._print(self._title)

    def step(self, row: StepRow) -> None:
        """Draw, if it is time."""
        now = self._clock()
        self._progress.step(row, now)
        if self._live is not None and now - self._drawn >= _DRAW_EVERY_S:
            self._drawn = now
            self._draw()
        elif self._live is None and now - self._drawn >= _LINE_EVERY_S:
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
        if self._live is not None:
            self._draw()
            self._live.stop()
        else:
            self._say()

    def _sum_up(self) -> None:
        if summary := self._row.summary():
            self._print(f"  {summary}")

    def _draw(self) -> None:
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
