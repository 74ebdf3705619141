"""Runs over each other, as one page."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from steadystep._utils.text import number
from steadystep.pages.charts import is_wide, thin, typical
from steadystep.pages.site import self_contained
from steadystep.runs.comparison import Comparison, compare, labels
from steadystep.runs.run import Run, Series

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_COLOURS = 8
_ROWS: tuple[tuple[str, str], ...] = (
    ("steps", "steps"),
    ("val_loss", "held-out loss at the end"),
    ("best_val_loss", "best held-out loss"),
    ("loss", "training loss at the end"),
    ("noise", "noise (one standard error)"),
    ("incidents", "incidents"),
    ("refused", "updates refused"),
    ("rollbacks", "rollbacks"),
    ("grad_norm", "gradient norm, median"),
    ("peak_lr", "highest learning rate"),
)


def compare_page(runs: Sequence[Run], compared: Comparison | None = None) -> str:
    """A whole HTML page that needs nothing beside itself."""
    compared = compared or compare(runs)
    return self_contained("compare.html", compared=compared, rows=rows(compared), charts=overlay(runs))


def rows(compared: Comparison) -> tuple[tuple[str, tuple[float | None, ...]], ...]:
    """The table: a name and a value for each run; rows in which no run has anything are left out."""
    made = [(said, tuple(getattr(one, key) for one in compared.runs)) for key, said in _ROWS]
    return tuple((said, values) for said, values in made if any(value is not None for value in values))


def overlay(runs: Sequence[Run], *, buckets: int = 500) -> dict[str, Any]:
    """Loss, held-out loss, gradient norm and learning rate of all, for the charts."""
    wanted: tuple[tuple[str, str, Callable[[Run], Series], bool], ...] = (
        ("loss", "Loss", lambda run: run.loss, False),
        ("val", "Validation loss", lambda run: run.validation.get("val_loss", Series()), False),
        ("norm", "Gradient norm", lambda run: run.grad_norm, True),
        ("lr", "Learning rate", lambda run: run.lr, False),
    )
    names = labels(runs)
    made = []
    for key, title, pick, log in wanted:
        curves = [(i, name, pick(run)) for i, (name, run) in enumerate(zip(names, runs, strict=True))]
        lines = [line for i, name, series in curves for line in _lines(i, name, series, buckets)]
        lines.sort(key=lambda line: "raw" not in line["role"])  # the lines through the noise on top of it
        wide = log or any(is_wide(series) for _, _, series in curves)
        if lines:
            made.append({"key": key, "title": title, "lines": lines, "log": wide, "rug": []})
    return {"panels": made, "marks": [], "signs": [], "restarts": [], "heat": None}


def _lines(at: int, name: str, series: Series, buckets: int) -> list[dict[str, Any]]:
    colour = f"c{at % _COLOURS}"
    if not len(series):
        return []
    middle = typical(series, buckets=160)
    if len(series) < 400 or not len(middle.steps):
        return [{"name": name, "role": colour, **thin(series, buckets=buckets).for_json()}]
    raw = {"name": "", "role": f"{colour} raw", **thin(series, buckets=buckets).for_json()}
    return [raw, {"name": name, "role": colour, **middle.for_json()}]


def show(compared: Comparison, console: "Console | None" = None) -> None:
    """The sentence, the numbers, and what was set differently."""
    from rich.console import Console  # why here: a page needs none of it, and the import takes time
    from rich.text import Text

    console = console or Console(highlight=False)
    console.print(Text(compared.said), soft_wrap=True)
    numbers = _table(compared)
    for name, values in rows(compared):
        numbers.add_row(name, *(_shown(value) for value in values))
    console.print(numbers)
    if not compared.settings:
        console.print("No setting differs, as far as the logs tell.")
        return
    different = _table(compared)
    for setting, set_to in compared.settings:
        different.add_row(Text(setting), *(Text(value) for value in set_to))
    console.print(different)


def _table(compared: Comparison) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for one in compared.runs:
        table.add_column(Text(one.name), justify="right", style="bold" if one.name == compared.better else "")
    return table


def _shown(value: float | None) -> str:
    return f"{value:,}" if isinstance(value, int) else number(value)
