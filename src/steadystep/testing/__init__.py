"""Contracts anyone can run on parts of their own: no torch, plain numbers."""

from steadystep.testing.detector_contract import check_detector
from steadystep.testing.signal_streams import signal_streams
from steadystep.testing.sink_contract import check_sink

__all__ = ["check_detector", "check_sink", "signal_streams"]
