"""RECORD: the run log, the sinks, and the messages a person sees. What fails is reported once; training goes on.

`Terminal` loads on first use: it draws with rich, whose import takes time and draws from Python's random numbers.
"""

from typing import TYPE_CHECKING

from steadystep.track.broadcast import Broadcast
from steadystep.track.messages import describe
from steadystep.track.reading import Follower, read
from steadystep.track.run import Incident, LayerNorms, Run, Series
from steadystep.track.run_log import RunLog
from steadystep.track.sink import GradientSample, RunStart, Sink, StepRow
from steadystep.track.sinks import MLflow, TensorBoard, WandB, default_sinks, named_sinks
from steadystep.track.tracker import NoLog, Tracker, Tracking

if TYPE_CHECKING:
    from steadystep.track.terminal import Terminal

__all__ = [
    "Broadcast",
    "Follower",
    "GradientSample",
    "Incident",
    "LayerNorms",
    "MLflow",
    "NoLog",
    "Run",
    "RunLog",
    "RunStart",
    "Series",
    "Sink",
    "StepRow",
    "TensorBoard",
    "Terminal",
    "Tracker",
    "Tracking",
    "WandB",
    "default_sinks",
    "describe",
    "named_sinks",
    "read",
]


def __getattr__(name: str) -> object:
    if name == "Terminal":
        from steadystep.track.terminal import Terminal

        return Terminal
    raise AttributeError(f"module 'steadystep.track' has no attribute {name!r}")
