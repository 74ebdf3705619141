"""Layers and functions that keep activations, logits and updates in range; each usable alone."""

from steadystep.layers.attention import QKClipReport, StableAttention, peak_logits, qk_clip_
from steadystep.layers.clipped_updates import ClippedUpdates
from steadystep.layers.limits import BoundedEmbedding, StableMLP, shrink_gradient, softcap, z_loss

__all__ = [
    "BoundedEmbedding",
    "ClippedUpdates",
    "QKClipReport",
    "StableAttention",
    "StableMLP",
    "peak_logits",
    "qk_clip_",
    "shrink_gradient",
    "softcap",
    "z_loss",
]
