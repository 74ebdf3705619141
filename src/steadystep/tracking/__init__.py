"""RECORD: the run log, the sinks and the messages on screen. A failure is reported once; training continues.

`Terminal` loads on first use: it imports rich, which takes time and draws from Python's random numbers.
"""

from typing import TYPE_CHECKING

from steadystep._utils import lazy_names
from steadystep.records import Incident
from steadystep.tracking.broadcast import Broadcast
from steadystep.tracking.log_format import describe
from steadystep.tracking.run_log import RunLog
from steadystep.tracking.sink import GradientSample, RunStart, Sink, StepRow
from steadystep.tracking.sinks import MLflow, TensorBoard, Trackio, WandB, default_sinks, named_sinks
from steadystep.tracking.tracker import NoLog, Tracker, Tracking

if TYPE_CHECKING:
    from steadystep.runs.run import LayerNorms, Run, Series
    from steadystep.runs.run_log import Follower, read
    from steadystep.tracking.alerts import Alert, Alerts
    from steadystep.tracking.terminal import Terminal

__all__ = [
    "Alert",
    "Alerts",
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
    "Trackio",
    "WandB",
    "default_sinks",
    "describe",
    "named_sinks",
    "read",
]

__getattr__ = lazy_names(
    __name__,
    {
        "alerts": ("Alert", "Alerts"),
        "terminal": ("Terminal",),
        ".runs.run": ("LayerNorms", "Run", "Series"),
        ".runs.run_log": ("Follower", "read"),
    },
)
