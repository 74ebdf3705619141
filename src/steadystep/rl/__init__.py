"""Reinforcement learning: one vocabulary for what RL libraries log, and a monitor that computes it from tensors."""

from typing import TYPE_CHECKING

from steadystep._utils import lazy_names

if TYPE_CHECKING:
    from steadystep.rl.controls import Controls
    from steadystep.rl.forecast import CeilingFit
    from steadystep.rl.monitor import Monitor, grad_norms_by_sign
    from steadystep.rl.vocabulary import METRICS, Metric, canonical, translate

__all__ = ["METRICS", "CeilingFit", "Controls", "Metric", "Monitor", "canonical", "grad_norms_by_sign", "translate"]

__getattr__ = lazy_names(
    __name__,
    {
        "controls": ("Controls",),
        "forecast": ("CeilingFit",),
        "monitor": ("Monitor", "grad_norms_by_sign"),
        "vocabulary": ("METRICS", "Metric", "canonical", "translate"),
    },
)
