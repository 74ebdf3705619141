"""The `steadystep` command. Each verb imports what it needs when it runs, so that `--help` is quick."""

import io
import sys
from pathlib import Path

import typer

from steadystep.cli.bench import bench
from steadystep.cli.diagnose import check, diagnose, printable_line
from steadystep.cli.pages import compare, dashboard, report
from steadystep.errors import ConfigError, SteadystepError
from steadystep.version import __version__

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
