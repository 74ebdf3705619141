"""Streaming estimators: plain numbers, safe with NaN, learning only what they are given, resumable through JSON."""

from steadystep.stats.streaming import Cusum, Level, Tail, Window, is_absurd

__all__ = ["Cusum", "Level", "Tail", "Window", "is_absurd"]
