"""`steadystep compare`: which of several runs is better, as text, JSON or a page."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from steadystep._utils.text import is_folder, number
from steadystep.cli.diagnose import Columns, by_role
from steadystep.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from steadystep.runs.comparison import Comparison

_RUNS = typer.Argument(help="Two or more runs: steadystep run folders or logs of other tools.")


def compare(
    runs: list[str] = _RUNS,
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of text."),
    column: Columns = None,
    out: str = typer.Option("", help="Also write an HTML page with overlaid curves to this file."),
) -> None:
    """Compare runs: which one is better, by how much beyond the noise, and which settings differ.

    Exit code 0: compared. 2: a run cannot be read.

    Example: steadystep compare runs/a runs/b --out both.html
    """
    if len(runs) < 2:
        raise ConfigError("compare needs at least two runs")
    for run in runs:
        is_folder(Path(run))  # before anything is imported for it
    from rich.console import Console

    from steadystep.pages.report import compare_page
    from steadystep.runs.comparison import compare as compared
    from steadystep.runs.open import open_run

    with Console(stderr=True).status("reading the runs ..."):
        asked = by_role(column)
        read = [open_run(run, asked) for run in runs]
        result = compared(read)
    if out:
        write_page(Path(out), compare_page(read, result))
    if as_json:
        typer.echo(json.dumps(result.as_dict()))
        return
    show(result)
    if out:
        typer.echo(f"wrote {out}")


def write_page(target: Path, page: str) -> None:
    """A page to a file; a folder that is missing or a full disk is the user's to know."""
    try:
        target.write_text(page, encoding="utf-8", errors="replace")  # names on disk may not be UTF-8
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written ({error.strerror}): choose another file with --out") from None


def show(compared: "Comparison", console: "Console | None" = None) -> None:
    """Print the result, the numbers and the settings that differ: a column for each run, or a row if those are many."""
    from rich.console import Console  # why here: a page needs none of it, and the import takes time
    from rich.text import Text

    from steadystep.pages.report import comparison_rows

    console = console or Console(highlight=False)
    console.print(Text(compared.said), soft_wrap=True)
    told = [(name, [_shown(value) for value in values]) for name, values in comparison_rows(compared)]
    console.print(_table(compared, told, console.width))
    if not compared.settings:
        console.print("No differing settings found in the logs.")
    elif _fits(compared, compared.settings, console.width):
        console.print(_table(compared, compared.settings, console.width))
    else:
        console.print(Text("\n".join(_setting(compared, *one) for one in compared.settings)))


def _fits(compared: "Comparison", told: Sequence[tuple[str, Sequence[str]]], width: int) -> bool:
    """Whether a column for each run has room."""
    columns = [max(len(one.name), *(len(values[i]) for _, values in told)) for i, one in enumerate(compared.runs)]
    return max(len(name) for name, _ in told) + sum(columns) + 2 * len(columns) <= width


def _setting(compared: "Comparison", name: str, values: Sequence[str]) -> str:
    """One setting in a line: each value, and the runs that have it."""
    runs = {value: [one.name for one, v in zip(compared.runs, values, strict=True) if v == value] for value in values}
    return f"{name}: " + "; ".join(f"{value} ({', '.join(named)})" for value, named in runs.items())


_WIDEST_NAME = 24


def _table(compared: "Comparison", told: Sequence[tuple[str, Sequence[str]]], width: int) -> "Table":
    """With a column for each run; with a row for each run and the first few numbers where those are too many."""
    from rich.table import Table
    from rich.text import Text

    names = [one.name for one in compared.runs]
    table = Table(box=None, pad_edge=False, header_style="bold")
    if _fits(compared, told, width):
        table.add_column("")
        for name in names:
            table.add_column(Text(name), justify="right", style="bold" if name == compared.better else "")
        for name, values in told:
            table.add_row(Text(name), *map(Text, values))
        return table
    longest = min(max(map(len, names)), _WIDEST_NAME)
    table.add_column("", no_wrap=True)
    room, kept = width - longest, []
    for name, values in told:
        wide = max(map(len, (*name.split(), *values)))
        if room < wide + 2:
            break
        room -= wide + 2
        kept.append(values)
        table.add_column(Text(name), justify="right", min_width=wide, max_width=wide)
    for i, name in enumerate(names):
        style = "bold" if name == compared.better else ""
        table.add_row(Text(_shortened(name, longest), style=style), *(Text(values[i]) for values in kept))
    return table


def _shortened(name: str, room: int) -> str:
    """Without its middle where it is too long: runs often differ at the end."""
    half = (room - 1) // 2
    return name if len(name) <= room else f"{name[: room - 1 - half]}…{name[-half:]}"


def _shown(value: float | None) -> str:
    return f"{value:,}" if isinstance(value, int) else number(value)
