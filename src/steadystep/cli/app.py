"""The `steadystep` command. Each verb imports what it needs when it runs, so that `--help` is quick."""

import io
import sys
from pathlib import Path

import typer

from steadystep._utils.text import install
from steadystep.cli.bench import bench
from steadystep.cli.diagnose import Columns, by_role, check, diagnose, printable_line
from steadystep.errors import ConfigError, SteadystepError
from steadystep.version import __version__

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
    from steadystep.pages.report import show

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


_MOST_LINES = 20

app = typer.Typer(
    name="steadystep",
    help="Keeps a PyTorch training run on course.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"steadystep {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Keeps a PyTorch training run on course."""


@app.command()
def demo(
    steps: int = typer.Option(700, min=70, help="Optimizer steps for each of the three runs."),
    seed: int = typer.Option(0, min=0, help="Another seed, another model and other batches."),
    run_dir: str = typer.Option("runs/demo", help="Where logs and pages go; a free name beside it when it is taken."),
) -> None:
    """Train a small transformer, break it three times on purpose, and see it caught, explained and recovered.

    Example: steadystep demo --steps 700
    """
    from steadystep.cli.demo import run

    run(steps=steps, seed=seed, run_dir=run_dir)


@app.command()
def train(
    config: str = typer.Argument("", help="A YAML file with a task and settings."),
    run_dir: str = typer.Option("", help="Where everything goes; runs/NAME of the file by default."),
    resume: bool = typer.Option(False, "--resume", help="Go on where the last checkpoint in that folder was taken."),
    force: bool = typer.Option(False, "--force", help="Use the folder although another process does."),
    new: str | None = typer.Option(None, "--new", help="Write NAME.py and NAME.yaml to begin with."),
    as_json: bool = typer.Option(False, "--json", help="For a program."),
) -> None:
    """Train from a YAML file: a built-in task, or package.module:factory of your own.

    Exit code 0: finished. 1: the guard had to stop it. 2: a mistake in the file. 130: Ctrl-C, after saving.

    Example: steadystep train my_run.yaml
    """
    from steadystep.cli import train as verb

    if new is not None:
        verb.new(new)
    elif not config:
        raise ConfigError("which file? steadystep train CONFIG, or --new NAME to begin with")
    else:
        raise typer.Exit(verb.run(Path(config), run_dir=run_dir, resume=resume, force=force, as_json=as_json))


@app.command("find-lr")
def find_lr(
    task: str = typer.Argument(help="A built-in task, such as gpt, clusters, regression or rnn."),
    seed: int = typer.Option(0, min=0, help="Another seed, another model and other batches."),
    steps: int = typer.Option(100, min=20, help="Learning rates to try, one training step each."),
    as_json: bool = typer.Option(False, "--json", help="For a program."),
) -> None:
    """Sweep the learning rate of a built-in task and say which one to train with.

    Example: steadystep find-lr gpt
    """
    from steadystep.cli.train import run_find_lr

    run_find_lr(task, seed=seed, steps=steps, as_json=as_json)


@app.command()
def replay(
    bundle: str = typer.Argument(help="The folder of one incident, such as runs/a/incidents/incident-000600-skip."),
    factory: str = typer.Option(help="package.module:function that returns (model, closure)."),
    precision: str | None = typer.Option(None, help="fp32, bf16 or fp16 instead of the one it happened in."),
    device: str | None = typer.Option(None, help="cpu, cuda, cuda:1, ...; by default where the factory puts it."),
    as_json: bool = typer.Option(False, "--json", help="For a program."),
) -> None:
    """Run an incident again from its bundle and name its origin.

    The closure is the one given to Guard.step; it gets the batch when the bundle holds one.
    Exit code 0: nothing went wrong this time. 1: it happened again. 2: it could not be run.

    Example: steadystep replay runs/a/incidents/incident-000600-skip --factory training:make
    """
    from steadystep.cli.train import run_replay

    raise typer.Exit(run_replay(bundle, factory=factory, precision=precision, device=device, as_json=as_json))


for verb in (check, diagnose, report, dashboard, compare, bench):
    app.command()(verb)


def told(error: Exception) -> str:
    """A user's mistake as a few short lines: what a file said is quoted in them, and a terminal obeys some of that."""
    lines = [printable_line(line) for line in str(error).split("\n") if line.strip()]
    more = [f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    return "error: " + "\n".join([*lines[:_MOST_LINES], *more])


def main() -> None:
    """Entry point: a user's mistake is a message and exit code 2, Ctrl-C is 130."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal or a pipe without UTF-8 shows ? instead of failing
            stream.reconfigure(errors="replace")
    try:
        app()
    except (SteadystepError, OSError) as error:  # OSError: a folder that cannot be written, a disk that is full
        typer.echo(told(error), err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        sys.exit(130)
