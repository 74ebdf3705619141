"""Streaming estimators: plain numbers, safe with NaN, learning only what they are given, resumable through JSON."""

from steadystep.stats.level import Level
from steadystep.stats.window import Cusum, Tail, Window

__all__ = ["Cusum", "Level", "Tail", "Window"]
