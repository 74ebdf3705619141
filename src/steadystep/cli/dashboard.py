"""`steadystep dashboard`: many runs as a live page."""

import typer

from steadystep.errors import ConfigError


def dashboard(path: str = typer.Argument(help="What to look at.")) -> None:
    """Many runs as a live page."""
    raise ConfigError("dashboard is not built yet")
