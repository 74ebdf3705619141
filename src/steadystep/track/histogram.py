"""Counts between edges, made without the training waiting for it."""

import numpy as np
from numpy.typing import NDArray

_BINS = 20


def histogram(values: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
    """Counts and edges of what is finite; None where nothing is."""
    finite = values[np.isfinite(values)].astype(np.float64)
    if not len(finite):
        return None
    low, high = finite.min(), finite.max()
    width = (high - low) / _BINS
    if width == 0.0:
        return np.histogram(finite, bins=_BINS)
    # why not numpy's own: bins of one width are found by a division, four times as quick
    counts = np.bincount(np.minimum((finite - low) / width, _BINS - 1).astype(np.intp), minlength=_BINS)
    return counts, low + width * np.arange(_BINS + 1)
