"""Layers and limits that keep activations, logits and updates in range; each usable alone."""

from steadystep.layers.attention import StableAttention
from steadystep.layers.bounded_embedding import BoundedEmbedding
from steadystep.layers.clipped_updates import ClippedUpdates
from steadystep.layers.gradient import shrink_gradient
from steadystep.layers.logits import softcap, z_loss
from steadystep.layers.mlp import StableMLP
from steadystep.layers.qk_clip import QKClipReport, peak_logits, qk_clip_

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
