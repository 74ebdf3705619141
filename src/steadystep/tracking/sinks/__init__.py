"""Sinks for the trackers people use. Each needs its extra, and says so."""

from steadystep.tracking.sinks.mlflow import MLflow
from steadystep.tracking.sinks.named import default_sinks, named_sinks
from steadystep.tracking.sinks.tensorboard import TensorBoard
from steadystep.tracking.sinks.wandb import WandB

__all__ = ["MLflow", "TensorBoard", "WandB", "default_sinks", "named_sinks"]
