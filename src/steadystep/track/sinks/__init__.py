"""Sinks for the trackers people use. Each needs its extra, and says so."""

from steadystep.track.sinks.mlflow import MLflow
from steadystep.track.sinks.named import default_sinks, named_sinks
from steadystep.track.sinks.tensorboard import TensorBoard
from steadystep.track.sinks.wandb import WandB

__all__ = ["MLflow", "TensorBoard", "WandB", "default_sinks", "named_sinks"]
