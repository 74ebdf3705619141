"""A scorecard to look at."""

import io
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from steadystep.faults.card.row import End, Row

if TYPE_CHECKING:
    from steadystep.faults.card.scorecard import Scorecard

_COLOURS = {
    "harmless": "dim",
    "saved": "green",
    "limited": "yellow",
    "lost": "red",
    "harmed": "bold red",
    "not applicable": "dim",
}
_WIDTH = 130


def table(card: "Scorecard") -> Table:
    """One line per fault; scores are over that of the run without a fault."""
    made = Table(title=_title(card), title_justify="left", caption=_caption(card), caption_justify="left")
    made.add_column("fault")
    made.add_column("verdict")
    made.add_column("unguarded", justify="right")
    made.add_column("guarded", justify="right")
    made.add_column("what the guard did")
    made.add_column("what it said")
    for row in card.rows:
        colour = _COLOURS[row.verdict]
        verdict = f"[{colour}]{row.verdict}[/{colour}]"
        if row.why_not:
            made.add_row(row.label, verdict, "", "", "", row.why_not)
        else:
            made.add_row(row.label, verdict, _ends(row, row.unguarded), _ends(row, row.guarded), _did(row), _said(row))
    return made


def text(card: "Scorecard") -> str:
    """The table without colours."""
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(table(card))
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def _title(card: "Scorecard") -> str:
    seeds = ", ".join(str(seed) for seed in card.seeds)
    return f"{card.steps} steps, the fault from step {card.at} on, seed{'s' * (len(card.seeds) > 1)} {seeds}"


def _caption(card: "Scorecard") -> str:
    counts = ", ".join(f"{count} {verdict}" for verdict, count in card.verdicts.items())
    return f"{counts}. Scores are over that without a fault; up to {1 + card.tolerance:.2f} counts as survived."


def _ends(row: Row, ends: Sequence[End]) -> str:
    told = [_end(end, clean) for end, clean in zip(ends, row.clean, strict=True)]
    if len(ends) == 1:
        return told[0]
    ratios = [end.ratio(clean) for end, clean in zip(ends, row.clean, strict=True)]
    survived = sum(end.as_well_as(clean, row.tolerance) for end, clean in zip(ends, row.clean, strict=True))
    middle = statistics.median(ratio if math.isfinite(ratio) else math.inf for ratio in ratios)
    return f"{survived}/{len(ends)} {_number(middle)}"


def _end(end: End, clean: End) -> str:
    ratio = end.ratio(clean)
    if not end.finite:
        return "NaN"
    shown = _number(ratio) if not math.isnan(ratio) else _number(end.score)
    return f"{shown} (stopped)" if end.stopped else shown


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN"
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.1e}"


def _did(row: Row) -> str:
    total: Counter[str] = Counter()
    for end in row.guarded:
        total.update(end.did)
    return ", ".join(f"{what} x{count}" if count > 1 else what for what, count in total.items()) or "nothing"


def _said(row: Row) -> str:
    causes = Counter(end.cause for end in row.guarded if end.cause)
    return ", ".join(cause for cause, _ in causes.most_common()) or "nothing"
