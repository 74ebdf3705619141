"""MEASURE: tensors become numbers here, in one pass and one transfer per optimizer step."""

from typing import TYPE_CHECKING

from steadystep._utils import lazy_names

if TYPE_CHECKING:
    from steadystep.signals.activations import Activations
    from steadystep.signals.attention_logits import AttentionLogits
    from steadystep.signals.batches import Inputs, Metrics, checked_metrics
    from steadystep.signals.gradients import Gradients
    from steadystep.signals.measurer import Measurer
    from steadystep.signals.outputs import Evidence, Outputs
    from steadystep.signals.probes import UpdateProbes
    from steadystep.signals.structure import structure_of
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
    "checked_metrics",
    "structure_of",
]

__getattr__ = lazy_names(
    __name__,
    {
        "activations": ("Activations",),
        "attention_logits": ("AttentionLogits",),
        "batches": ("Inputs", "Metrics", "checked_metrics"),
        "gradients": ("Gradients",),
        "measurer": ("Measurer",),
        "outputs": ("Evidence", "Outputs"),
        "probes": ("UpdateProbes",),
        "structure": ("structure_of",),
        "weights": ("GradientSamples", "RowNorms", "StatePeaks", "WeightNorms"),
    },
)
