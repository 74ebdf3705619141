"""Warnings that point at the user's line, not at ours."""

import sys
import warnings
from pathlib import Path

_PACKAGE = str(Path(__file__).parent)


def warn(message: str) -> None:
    """A UserWarning attributed to the first caller outside this package."""
    depth, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(f"steadystep: {message}", stacklevel=depth)
