"""`steadystep check`: the checklist, on a config, a training script or a run."""

import typer

from steadystep.errors import ConfigError


def check(path: str = typer.Argument(help="What to look at.")) -> None:
    """The checklist, on a config, a training script or a run."""
    raise ConfigError("check is not built yet")
