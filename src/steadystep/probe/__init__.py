"""The learning-rate range probe: a short sweep on a snapshot that is put back afterwards."""

from steadystep.probe.curve import LRCurve, Verdict
from steadystep.probe.sweep import find_lr

__all__ = ["LRCurve", "Verdict", "find_lr"]
