"""`steadystep report`: one run as one page."""

from pathlib import Path

import typer

from steadystep.cli.columns import Columns, by_role
from steadystep.errors import ConfigError


def report(
    run: str = typer.Argument(help="A run's folder, or another tool's log: TensorBoard, CSV, trainer_state.json."),
    out: str = typer.Option("", help="The file to write; report.html in the run's folder by default."),
    column: Columns = None,
    show: bool = typer.Option(False, "--open", help="Open it in a browser."),
) -> None:
    """One run as one HTML file: verdict, curves, incidents, layers, settings. It opens from disk, with no network.

    Exit code 0: written. 2: there is no run to read, or the file cannot be written.

    Example: steadystep report runs/a --open
    """
    from rich.console import Console

    from steadystep.curves import find_runs, open_run
    from steadystep.report import report_page

    place, asked = Path(run), by_role(column)
    find_runs(run)  # before anything else is asked of such a path
    target = Path(out) if out else (place / "report.html" if place.is_dir() else place.with_suffix(".report.html"))
    with Console(stderr=True).status("reading the run ..."):
        write_page(target, report_page(open_run(run, asked)))
    typer.echo(f"wrote {target}")
    if show:
        typer.launch(str(target))


def write_page(target: Path, page: str) -> None:
    """A page to a file; a folder that is missing or a full disk is the user's to know."""
    try:
        target.write_text(page, encoding="utf-8", errors="replace")  # names on disk may not be UTF-8
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written ({error.strerror}); another place with --out FILE") from None
