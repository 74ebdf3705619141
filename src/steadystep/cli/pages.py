"""`steadystep compare`: several runs side by side."""

from pathlib import Path

import typer

from steadystep._utils.text import install
from steadystep.cli.diagnose import Columns, by_role
from steadystep.errors import ConfigError

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

    from steadystep.pages.compare import compare_page
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
    from steadystep.pages.compare import show

    show(result)
    if out:
        typer.echo(f"wrote {out}")


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

    from steadystep.pages.report import report_page
    from steadystep.runs.open import find_runs, open_run

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


def dashboard(
    folder: str = typer.Argument("runs", help="The folder with the runs, however deep they are in it."),
    port: int = typer.Option(8700, min=0, max=65535, help="0 takes any free port."),
    host: str = typer.Option("127.0.0.1", help="Another address lets others in, with a token."),
    token: str = typer.Option("", help="What visitors must show; made and printed when left out."),
    show: bool = typer.Option(False, "--open", help="Open it in a browser."),
) -> None:
    """All runs in a folder as a live page: health at a glance, curves as they grow, incidents, comparisons.

    Only this machine can reach it unless --host says otherwise; then a token is needed. Ctrl-C ends it.
    Exit code 0: ended by you. 2: no such folder, the port is taken, or the extra is not installed.

    Example: steadystep dashboard runs --open
    """
    try:
        from steadystep.pages.server import address, is_loopback, listen, new_token, prepare, serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: {install('dashboard')}") from None

    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(
            f"{root}: no such folder; runs go where Guard(..., run_dir=...) or `steadystep train` put them"
        )
    if token and not (token.isascii() and token.isprintable()):
        raise ConfigError("--token: use plain letters and digits, they go into an address")
    shown = token or (None if is_loopback(host) else new_token())
    listening = listen(host, port)
    library = prepare(root)
    where = address(host, listening, shown)
    typer.echo(f"{where}  (Ctrl-C ends it)")
    if show:
        typer.launch(where)
    try:
        serve(library, listening, token=shown)
    except KeyboardInterrupt:
        pass
    finally:
        listening.close()
    typer.echo("ended", err=True)
