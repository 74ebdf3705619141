"""Gradient clipping that returns what it measured and never applies a non-finite norm."""

from steadystep.clip.global_norm import ClipReport, clip_global_norm_, clip_value_
from steadystep.clip.learned import NormRule, PercentileClip, ZScoreClip
from steadystep.clip.per_tensor import TensorEMAClip, agc_

__all__ = [
    "ClipReport",
    "NormRule",
    "PercentileClip",
    "TensorEMAClip",
    "ZScoreClip",
    "agc_",
    "clip_global_norm_",
    "clip_value_",
]
