"""The `steadystep` command. Each verb imports what it needs when it runs, so that `--help` is quick."""

import sys

import typer

from steadystep.errors import SteadystepError
from steadystep.version import __version__

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
) -> None:
    """Train a small transformer, break it twice on purpose, and see it caught, explained and recovered.

    Example: steadystep demo --steps 700
    """
    from steadystep.cli.demo import run

    run(steps=steps, seed=seed)


def main() -> None:
    """Entry point: a user's mistake is a message and exit code 2, Ctrl-C is 130."""
    try:
        app()
    except SteadystepError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        sys.exit(130)
