"""NOTICE: one failure mode per file. Plain numbers in, findings out."""

from steadystep.detectors.detector import Detector
from steadystep.detectors.non_finite import NonFinite

__all__ = ["Detector", "NonFinite"]
