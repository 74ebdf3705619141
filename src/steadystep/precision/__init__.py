"""Mixed precision as one setting: fp32, bf16 or fp16, on any device torch.amp supports, CPU included."""

from steadystep.precision.islands import Fp32Islands
from steadystep.precision.precision import Precision, ScalerReport
from steadystep.precision.underflow import underflow_share

__all__ = ["Fp32Islands", "Precision", "ScalerReport", "underflow_share"]
