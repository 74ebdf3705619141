"""What there is to know about optimizers that torch has no word for."""

from steadystep.optimizers.inner import all_inside, gather_state, own_state
from steadystep.optimizers.own_values import OwnValues, is_same, put_into
from steadystep.optimizers.together import Together, as_one, each_of

SET_BY_LOOPS = ("lr", "weight_decay", "momentum", "betas", "eps")
"""What a loop or its scheduler sets in a parameter group. The rest is the optimizer's: many count there."""

__all__ = [
    "SET_BY_LOOPS",
    "OwnValues",
    "Together",
    "all_inside",
    "as_one",
    "each_of",
    "gather_state",
    "is_same",
    "own_state",
    "put_into",
]
