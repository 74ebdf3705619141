"""`steadystep compare`: several runs side by side."""

import typer

from steadystep.errors import ConfigError


def compare(path: str = typer.Argument(help="What to look at.")) -> None:
    """Several runs side by side."""
    raise ConfigError("compare is not built yet")
