"""`steadystep bench`: the tables: stability, precision, detection, recovery, overhead."""

import typer

from steadystep.errors import ConfigError


def bench(path: str = typer.Argument(help="What to look at.")) -> None:
    """The tables: stability, precision, detection, recovery, overhead."""
    raise ConfigError("bench is not built yet")
