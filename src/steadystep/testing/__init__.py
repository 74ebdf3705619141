"""Contracts anyone can run on parts of their own: no torch, plain numbers."""

from steadystep.testing.detector_contract import check_detector
from steadystep.testing.signal_streams import signal_streams

__all__ = ["check_detector", "signal_streams"]
