"""Streaming estimators: plain numbers, safe with NaN, learning only what they are given, resumable through JSON."""

from steadystep.stats.cusum import Cusum
from steadystep.stats.level import Level
from steadystep.stats.tail import Tail
from steadystep.stats.window import Window

__all__ = ["Cusum", "Level", "Tail", "Window"]
