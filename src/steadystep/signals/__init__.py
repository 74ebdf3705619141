"""MEASURE: tensors become numbers here, in one pass and one transfer per optimizer step."""

from steadystep.signals.gradients import Gradients
from steadystep.signals.looker import Looker, Metrics, checked

__all__ = ["Gradients", "Looker", "Metrics", "checked"]
