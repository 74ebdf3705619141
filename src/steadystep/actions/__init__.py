"""ACT: the only stage that changes weights, moments or learning rates."""

from steadystep.actions.around import Around
from steadystep.actions.learning_rate import LearningRate
from steadystep.actions.tensor_clip import ByTensors, ByUnits, TensorClip
from steadystep.actions.update import Update

__all__ = ["Around", "ByTensors", "ByUnits", "LearningRate", "TensorClip", "Update"]
