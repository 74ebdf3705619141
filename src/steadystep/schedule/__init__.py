"""Learning-rate schedules as pure functions: step -> multiplier of the base learning rate.

Steps count updates from 0. Everything but `as_torch` and `from_torch` runs without torch.
"""

from typing import TYPE_CHECKING

from steadystep._utils import lazy_names
from steadystep.schedule.curves import (
    Schedule,
    constant,
    cosine,
    cosine_restarts,
    exponential,
    inverse_sqrt,
    linear,
    one_minus_sqrt,
    polynomial,
    step_decay,
    then,
    warmup,
    wsd,
)
from steadystep.schedule.names import NAMES, named
from steadystep.schedule.plateau import Plateau

if TYPE_CHECKING:
    from steadystep.schedule.torch_bridge import as_torch, from_torch

__all__ = [
    "NAMES",
    "Plateau",
    "Schedule",
    "as_torch",
    "constant",
    "cosine",
    "cosine_restarts",
    "exponential",
    "from_torch",
    "inverse_sqrt",
    "linear",
    "named",
    "one_minus_sqrt",
    "polynomial",
    "step_decay",
    "then",
    "warmup",
    "wsd",
]

__getattr__ = lazy_names(__name__, {"torch_bridge": ("as_torch", "from_torch")})
