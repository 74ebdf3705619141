"""RECORD: the run log, the sinks, and the messages a person sees. What fails is reported once; training goes on."""

from steadystep.track.broadcast import Broadcast
from steadystep.track.messages import describe
from steadystep.track.reading import Follower, read
from steadystep.track.run import Incident, LayerNorms, Run, Series
from steadystep.track.run_log import RunLog
from steadystep.track.sink import GradientSample, RunStart, Sink, StepRow
from steadystep.track.sinks import MLflow, TensorBoard, WandB, default_sinks, named_sinks
from steadystep.track.terminal import Terminal
from steadystep.track.tracker import NoLog, Tracker, Tracking

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
