"""What there is to know about optimizers that torch has no word for."""

from steadystep.optimizers.combined import (
    CombinedOptimizer,
    OwnValues,
    Trained,
    all_inside,
    as_one,
    each_of,
    gather_state,
    own_state,
)

SET_BY_LOOPS = ("lr", "weight_decay", "momentum", "betas", "eps")
"""What a loop or its scheduler sets in a parameter group. The rest is the optimizer's: many count there."""

__all__ = [
    "SET_BY_LOOPS",
    "CombinedOptimizer",
    "OwnValues",
    "Trained",
    "all_inside",
    "as_one",
    "each_of",
    "gather_state",
    "own_state",
]
