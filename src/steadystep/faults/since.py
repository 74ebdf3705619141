"""Steps without an end."""

import sys


def since(start: int) -> range:
    """`start` and all that follow."""
    return range(start, sys.maxsize)
