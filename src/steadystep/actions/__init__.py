"""ACT: the only stage that changes weights, moments or learning rates."""

from steadystep.actions.clip import ByTensors, ByUnits, TensorClip
from steadystep.actions.manual_update import Around
from steadystep.actions.update import Update
from steadystep.engine.learning_rate import LearningRate

__all__ = ["Around", "ByTensors", "ByUnits", "LearningRate", "TensorClip", "Update"]
