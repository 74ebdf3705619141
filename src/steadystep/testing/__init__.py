"""Contract checks for detectors and sinks of your own: no torch, plain numbers."""

from steadystep.testing.contracts import check_detector, check_sink
from steadystep.testing.signal_streams import signal_streams

__all__ = ["check_detector", "check_sink", "signal_streams"]
