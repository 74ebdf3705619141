"""MEASURE: tensors become numbers here, in one pass and one transfer per optimizer step."""

from steadystep.signals.activations import Activations
from steadystep.signals.attention_logits import AttentionLogits
from steadystep.signals.batches import Inputs, Metrics, checked
from steadystep.signals.gradients import Gradients, structure_of
from steadystep.signals.measurer import Measurer
from steadystep.signals.outputs import Evidence, Outputs
from steadystep.signals.probes import UpdateProbes
from steadystep.signals.weights import GradientSamples, RowNorms, StatePeaks, WeightNorms

__all__ = [
    "Activations",
    "AttentionLogits",
    "Evidence",
    "GradientSamples",
    "Gradients",
    "Inputs",
    "Measurer",
    "Metrics",
    "Outputs",
    "RowNorms",
    "StatePeaks",
    "UpdateProbes",
    "WeightNorms",
    "checked",
    "structure_of",
]
