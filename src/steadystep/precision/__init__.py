"""Mixed precision as one setting: fp32, bf16 or fp16, on any device torch.amp supports, CPU included."""

from steadystep.precision.precision import Fp32Islands, Precision, ScalerReport, underflow_share

__all__ = ["Fp32Islands", "Precision", "ScalerReport", "underflow_share"]
