"""`steadystep report`: one run as one page."""

import typer

from steadystep.errors import ConfigError


def report(path: str = typer.Argument(help="What to look at.")) -> None:
    """One run as one page."""
    raise ConfigError("report is not built yet")
