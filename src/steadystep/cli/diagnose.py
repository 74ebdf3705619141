"""`steadystep diagnose`: read the curves of any run and say what is wrong with it."""

import typer

from steadystep.errors import ConfigError


def diagnose(path: str = typer.Argument(help="What to look at.")) -> None:
    """Read the curves of any run and say what is wrong with it."""
    raise ConfigError("diagnose is not built yet")
