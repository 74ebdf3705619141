"""ACT: the only stage that changes weights, moments or learning rates (`updater.py`)."""

from steadystep.actions.updater import REFUSALS, Around, ByTensors, ByUnits, TensorClip, Updater

__all__ = ["REFUSALS", "Around", "ByTensors", "ByUnits", "TensorClip", "Updater"]
