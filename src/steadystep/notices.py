"""Warnings that point at the user's line, not at ours; and none where something else tells the story."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PACKAGE = str(Path(__file__).parent)


def warn(message: str) -> None:
    """A UserWarning attributed to the first caller outside this package."""
    depth, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(f"steadystep: {message}", stacklevel=depth)


def note(message: str) -> None:
    """A line for whoever reads the `steadystep` logger at level INFO."""
    logging.getLogger("steadystep").info(message)


@contextmanager
def quiet_log() -> Iterator[None]:
    """Nothing but errors on the `steadystep` logger: a table or a screen tells what happened."""
    log = logging.getLogger("steadystep")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
