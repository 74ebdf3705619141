"""Contracts anyone can run on parts of their own: no torch, plain numbers."""

from steadystep.testing.contracts import check_detector, check_sink
from steadystep.testing.signal_streams import signal_streams

__all__ = ["check_detector", "check_sink", "signal_streams"]
