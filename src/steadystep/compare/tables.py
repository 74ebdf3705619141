"""A comparison for a terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from steadystep.compare.comparison import Comparison
from steadystep.compare.page import rows
from steadystep.report.words import number


def show(compared: Comparison, console: Console | None = None) -> None:
    """The sentence, the numbers, and what was set differently."""
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


def _table(compared: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for one in compared.runs:
        table.add_column(Text(one.name), justify="right", style="bold" if one.name == compared.better else "")
    return table


def _shown(value: float | None) -> str:
    return f"{value:,}" if isinstance(value, int) else number(value)
