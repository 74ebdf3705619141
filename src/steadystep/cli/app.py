"""The `steadystep` command. Each verb imports what it needs when it runs, so that `--help` is quick."""

import io
import json
import sys
from pathlib import Path

import typer

from steadystep._utils.text import install, is_folder
from steadystep.cli import check_bundle, check_task
from steadystep.cli.bench import bench
from steadystep.cli.check import check
from steadystep.cli.compare import compare, write_page
from steadystep.cli.diagnose import Columns, as_json_dict, by_role, diagnose, printable_line
from steadystep.cli.mcp import mcp
from steadystep.errors import ConfigError, SteadystepError
from steadystep.version import __version__


def report(
    run: str = typer.Argument(
        help="A run folder, or the log of another tool: TensorBoard events, CSV, JSON lines, trainer_state.json."
    ),
    out: str = typer.Option("", help="Output file. Default: report.html in the run folder."),
    column: Columns = None,
    show: bool = typer.Option(False, "--open", help="Open the page in a browser."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of text: the file, the verdict, numbers."),
) -> None:
    """Write one run as a self-contained HTML file: diagnosis, curves, incidents, layers, settings.

    Exit code 0: written. 2: the run cannot be read, or the file cannot be written.

    Example: steadystep report runs/a --open
    """
    place, asked = Path(run), by_role(column)
    is_folder(place)  # before anything is imported for it
    from rich.console import Console

    from steadystep.pages.report import report_page
    from steadystep.runs.diagnosis import diagnose as read_curves
    from steadystep.runs.diagnosis import headline
    from steadystep.runs.open import find_runs, open_run

    find_runs(run)  # before anything else is asked of such a path
    target = Path(out) if out else (place / "report.html" if place.is_dir() else place.with_suffix(".report.html"))
    with Console(stderr=True).status("reading the run ..."):
        opened = open_run(run, asked)
        reading = read_curves(opened)
        verdict = headline(opened, reading)
        write_page(target, report_page(opened, verdict))
    if as_json:
        typer.echo(json.dumps({"wrote": str(target), **as_json_dict(opened, reading, verdict)}))
    else:
        typer.echo(f"{verdict.said}\nwrote {target}")
    if show:
        typer.launch(str(target))


def dashboard(
    folder: str = typer.Argument("runs", help="Folder with runs; subfolders are searched."),
    port: int = typer.Option(8700, min=0, max=65535, help="Port to listen on; 0 for any free port."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on; other than localhost requires a token."),
    token: str = typer.Option("", help="Access token. Default: generated and printed if one is needed."),
    show: bool = typer.Option(False, "--open", help="Open the page in a browser."),
    as_json: bool = typer.Option(False, "--json", help="Print the address as JSON, for a program that starts it."),
) -> None:
    """Serve all runs of a folder as a live page: status, curves, incidents and comparisons.

    It listens on this machine only, unless --host is given; then a token is required. Stop it with Ctrl-C.
    Exit code 0: stopped by Ctrl-C. 2: no such folder, port in use, or the extra is not installed.

    Example: steadystep dashboard runs --open
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"{root}: no such folder; runs are written by Guard(..., run_dir=...) or `steadystep train`")
    try:
        from steadystep.pages.server import address, is_loopback, listen, new_token, prepare, serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: {install('dashboard')}") from None

    if token and not (token.isascii() and token.isprintable()):
        raise ConfigError("--token: use plain letters and digits only, because it is part of a URL")
    shown = token or (None if is_loopback(host) else new_token())
    listening = listen(host, port)
    library = prepare(root)
    where = address(host, listening, shown)
    typer.echo(json.dumps({"address": where, "token": shown}) if as_json else f"{where}  (Ctrl-C ends it)")
    if show:
        typer.launch(where)
    try:
        serve(library, listening, token=shown)
    except KeyboardInterrupt:
        pass
    finally:
        listening.close()
    typer.echo("stopped", err=True)


_MOST_LINES = 20

app = typer.Typer(
    name="steadystep",
    help="Keep PyTorch training runs stable: detect, diagnose and recover from instabilities.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"steadystep {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Keep PyTorch training runs stable: detect, diagnose and recover from instabilities."""


@app.command()
def demo(
    steps: int = typer.Option(700, min=70, help="Optimizer steps of each of the three runs."),
    seed: int = typer.Option(0, min=0, help="Seed of the model and the batches."),
    run_dir: str = typer.Option("runs/demo", help="Folder for logs and pages; a number is appended if it exists."),
    as_json: bool = typer.Option(False, "--json", help="Print the results as JSON, and the text to stderr."),
) -> None:
    """Train a small transformer with three injected faults, unguarded and guarded, and compare the results.

    Example: steadystep demo --steps 700
    """
    from steadystep.cli.demo import run

    run(steps=steps, seed=seed, run_dir=run_dir, as_json=as_json)


@app.command()
def train(
    config: str = typer.Argument("", help="YAML file with a task and settings."),
    run_dir: str = typer.Option("", help="Output folder. Default: runs/NAME, after the YAML file."),
    resume: bool = typer.Option(False, "--resume", help="Continue from the last checkpoint in the output folder."),
    force: bool = typer.Option(False, "--force", help="Use the folder even if another process is using it."),
    new: str | None = typer.Option(None, "--new", help="Write NAME.py and NAME.yaml as a starting point."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of text."),
) -> None:
    """Train a built-in task, or your own package.module:factory, from a YAML file.

    Exit code 0: finished. 1: stopped by the guard. 2: an error in the file. 130: Ctrl-C, after saving.

    Example: steadystep train my_run.yaml
    """
    from steadystep.train import RunPlan, write_example  # torch is imported when the file is known to be right

    if new is not None:
        program, settings = write_example(new, Path.cwd())
        typer.echo(f"wrote {program.name} and {settings.name}; start it with: steadystep train {settings.name}")
    elif not config:
        raise ConfigError("no file given: use steadystep train CONFIG, or --new NAME to create one")
    else:
        plan = RunPlan.load(Path(config))
        check_task(plan.run.task)
        from steadystep.cli import train as verb

        raise typer.Exit(verb.run(plan, Path(config), run_dir=run_dir, resume=resume, force=force, as_json=as_json))


@app.command("find-lr")
def find_lr(
    what: str = typer.Argument(help="YAML file as for train, your package.module:factory, or a built-in task."),
    seed: int | None = typer.Option(None, min=0, help="Seed of the factory. Default: that of the file, or 0."),
    steps: int = typer.Option(100, min=20, help="Number of learning rates to try, one training step each."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of text."),
) -> None:
    """Sweep the learning rate of a training job and suggest one.

    Example: steadystep find-lr my_run.yaml
    """
    from steadystep.train import RunPlan, RunSettings

    is_file = Path(what).suffix in (".yaml", ".yml")
    settings = RunPlan.load(Path(what)).run if is_file else RunSettings(task=what)
    check_task(settings.task)
    from steadystep.cli.train import run_find_lr

    run_find_lr(settings, seed=settings.seed if seed is None else seed, steps=steps, as_json=as_json)


@app.command()
def examine(
    factory: str = typer.Argument(help="Your package.module:factory, as for train, or a built-in task such as gpt."),
    after: int = typer.Option(0, min=0, help="Train so many steps first, unchanged, and examine what came of them."),
    steps: int = typer.Option(40, min=10, help="Updates of each trial."),
    seconds: float = typer.Option(60.0, min=1.0, help="Begin no further trial after this time."),
    max_grad_norm: float | None = typer.Option(None, min=0.0, help="Limit that your loop clips gradients to."),
    seed: int = typer.Option(0, min=0, help="Seed of the factory and the trials."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of text."),
) -> None:
    """Examine a training job by short experiments: name the cause and a repair that was tried.

    Exit code 0: healthy. 1: a fault was found. 2: it could not be run.

    Example: steadystep examine training:make
    """
    check_task(factory)
    from steadystep.cli.train import run_examine

    code = run_examine(
        factory, after=after, steps=steps, seconds=seconds, max_grad_norm=max_grad_norm, seed=seed, as_json=as_json
    )
    raise typer.Exit(code)


@app.command()
def replay(
    bundle: str = typer.Argument(help="Folder of one incident, such as runs/a/incidents/incident-000600-skip."),
    factory: str = typer.Option(help="Function that returns (model, closure), written as package.module:function."),
    precision: str | None = typer.Option(
        None, help="Precision for the replay: fp32, bf16 or fp16. Default: as recorded."
    ),
    device: str | None = typer.Option(
        None, help="Device for the replay: cpu, cuda, cuda:1, ... Default: as set by the factory."
    ),
    without: int = typer.Option(
        0,
        "--without-guard",
        min=0,
        metavar="STEPS",
        help="Also apply the refused update and take the steps after it; the report draws the result. The factory "
        "returns the optimizer too.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of text."),
) -> None:
    """Re-run an incident from its bundle and locate its origin.

    The closure is the one given to Guard.step; it receives the batch if the bundle contains one.
    Exit code 0: not reproduced. 1: reproduced. 2: it could not be run.

    Example: steadystep replay runs/a/incidents/incident-000600-skip --factory training:make
    """
    check_bundle(Path(bundle), factory)
    from steadystep.cli.train import run_replay

    code = run_replay(bundle, factory=factory, precision=precision, device=device, without=without, as_json=as_json)
    raise typer.Exit(code)


for verb in (check, diagnose, report, dashboard, compare, mcp, bench):
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
        app(prog_name="steadystep")
    except (SteadystepError, OSError) as error:  # OSError: a folder that cannot be written, a disk that is full
        typer.echo(told(error), err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        sys.exit(130)
