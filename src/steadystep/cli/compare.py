"""`steadystep compare`: several runs side by side."""

from pathlib import Path

import typer

from steadystep.cli.columns import Columns, by_role

_RUNS = typer.Argument(help="Two runs or more, of steadystep or of other tools.")


def compare(
    runs: list[str] = _RUNS,
    as_json: bool = typer.Option(False, "--json", help="For a program."),
    column: Columns = None,
    out: str = typer.Option("", help="Write a page with the curves over each other to this file."),
) -> None:
    """Which run is better, by how much beyond its noise, and which settings differ.

    Exit code 0: compared. 2: a run cannot be read.

    Example: steadystep compare runs/a runs/b --out both.html
    """
    import json

    from rich.console import Console

    from steadystep.cli.report import write_page
    from steadystep.compare import compare as compared
    from steadystep.compare import compare_page
    from steadystep.curves import open_run

    with Console(stderr=True).status("reading the runs ..."):
        asked = by_role(column)
        read = [open_run(run, asked) for run in runs]
        result = compared(read)
    if out:
        write_page(Path(out), compare_page(read, result))
    if as_json:
        typer.echo(json.dumps(result.as_dict()))
        return
    from steadystep.compare.tables import show

    show(result)
    if out:
        typer.echo(f"wrote {out}")
