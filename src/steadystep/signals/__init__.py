"""MEASURE: tensors become numbers here, in one pass and one transfer per optimizer step."""

from steadystep.signals.activations import Activations
from steadystep.signals.attention_logits import AttentionLogits
from steadystep.signals.batches import Inputs, Metrics, checked
from steadystep.signals.gradients import Gradients
from steadystep.signals.measurer import Measurer
from steadystep.signals.probes import UpdateProbes
from steadystep.signals.weights import GradientSamples, RowNorms, StatePeaks, WeightNorms

__all__ = [
    "Activations",
    "AttentionLogits",
    "GradientSamples",
    "Gradients",
    "Inputs",
    "Measurer",
    "Metrics",
    "RowNorms",
    "StatePeaks",
    "UpdateProbes",
    "WeightNorms",
    "checked",
]
