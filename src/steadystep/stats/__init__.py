"""Streaming estimators: plain numbers, safe with NaN, learning only what they are given, resumable through JSON."""

from steadystep.stats.level import DIFFERENCE_SIGMA, ONE_SIGMA, SIGMA_PER_MAD, Level
from steadystep.stats.window import Cusum, Tail, Window

__all__ = ["DIFFERENCE_SIGMA", "ONE_SIGMA", "SIGMA_PER_MAD", "Cusum", "Level", "Tail", "Window"]
