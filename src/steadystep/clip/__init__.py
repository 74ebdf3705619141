"""Gradient clipping that returns what it measured and never lets a non-finite norm through."""

from steadystep.clip.global_norm import clip_global_norm_
from steadystep.clip.report import ClipReport
from steadystep.clip.value import clip_value_

__all__ = ["ClipReport", "clip_global_norm_", "clip_value_"]
