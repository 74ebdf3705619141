"""Settings for a run whose framework has loggers of its own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steadystep.config import Config


def without_sinks(config: Config | Mapping[str, Any] | str | Path | None) -> Config:
    """The settings; unless they name sinks there are none beside the framework's loggers."""
    settings = Config.load(config)
    if settings.monitoring.sinks is not None:
        return settings
    return settings.model_copy(update={"monitoring": settings.monitoring.model_copy(update={"sinks": ()})})
