"""ACT: the only stage that changes weights, moments or learning rates."""

from steadystep.actions.apply import REFUSALS, ByTensors, ByUnits, TensorClip, Updater
from steadystep.actions.manual_update import Around

__all__ = ["REFUSALS", "Around", "ByTensors", "ByUnits", "TensorClip", "Updater"]
