"""MEASURE: tensors become numbers here, in one pass and one transfer per optimizer step."""

from steadystep.signals.activations import Activations
from steadystep.signals.gradients import Gradients
from steadystep.signals.inputs import Inputs
from steadystep.signals.looker import Looker, Metrics, checked
from steadystep.signals.probes import Probes

__all__ = ["Activations", "Gradients", "Inputs", "Looker", "Metrics", "Probes", "checked"]
