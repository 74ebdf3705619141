"""Gradient clipping that returns what it measured and never lets a non-finite norm through."""

from steadystep.clip.agc import agc_
from steadystep.clip.global_norm import clip_global_norm_
from steadystep.clip.percentile import PercentileClip
from steadystep.clip.report import ClipReport
from steadystep.clip.rule import NormRule
from steadystep.clip.tensor_ema import TensorEMAClip
from steadystep.clip.value import clip_value_
from steadystep.clip.zscore import ZScoreClip

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
