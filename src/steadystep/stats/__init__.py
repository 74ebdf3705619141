"""Streaming estimators: plain numbers, safe with NaN, learning only what they are given, resumable through JSON."""

from steadystep.stats.streaming import (
    DIFFERENCE_SIGMA,
    ONE_SIGMA,
    SIGMA_PER_MAD,
    Cusum,
    Level,
    Tail,
    Window,
    is_absurd,
)

__all__ = ["DIFFERENCE_SIGMA", "ONE_SIGMA", "SIGMA_PER_MAD", "Cusum", "Level", "Tail", "Window", "is_absurd"]
