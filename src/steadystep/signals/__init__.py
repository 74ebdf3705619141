"""MEASURE: tensors become numbers here, in one pass and one transfer per optimizer step."""

from steadystep.signals.activations import Activations
from steadystep.signals.attention_logits import AttentionLogits
from steadystep.signals.gradient_samples import GradientSamples
from steadystep.signals.gradients import Gradients
from steadystep.signals.inputs import Inputs
from steadystep.signals.looker import Looker, Metrics, checked
from steadystep.signals.probes import Probes
from steadystep.signals.row_norms import RowNorms
from steadystep.signals.state_peaks import StatePeaks
from steadystep.signals.weight_norms import WeightNorms

__all__ = [
    "Activations",
    "AttentionLogits",
    "GradientSamples",
    "Gradients",
    "Inputs",
    "Looker",
    "Metrics",
    "Probes",
    "RowNorms",
    "StatePeaks",
    "WeightNorms",
    "checked",
]
