"""Counts between edges, made without the training waiting for it."""

import numpy as np
from numpy.typing import NDArray

_BINS = 30


def histogram(values: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
    """Counts and edges of what is finite; None where nothing is."""
    finite = values[np.isfinite(values)].astype(np.float64)
    return np.histogram(finite, bins=_BINS) if len(finite) else None
