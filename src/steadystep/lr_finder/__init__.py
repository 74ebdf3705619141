"""Learning-rate range test: a short sweep on a snapshot that is restored afterwards."""

from steadystep.lr_finder.curve import LRCurve, SweepShape
from steadystep.lr_finder.sweep import find_lr

__all__ = ["LRCurve", "SweepShape", "find_lr"]
