"""Figures, where matplotlib is installed."""

import importlib
from typing import Any

from steadystep.errors import ConfigError


def pyplot() -> Any:
    """The plotting part of matplotlib without a window, or a clear word about how to get it."""
    try:
        importlib.import_module("matplotlib").use("Agg")
    except ModuleNotFoundError:
        raise ConfigError("--figure needs matplotlib: pip install 'steadystep[lab]'") from None
    return importlib.import_module("matplotlib.pyplot")
