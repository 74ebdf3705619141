"""What there is to know about optimizers that torch has no word for."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

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
    "hparams_of",
    "own_state",
]

_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Settings that change how an update is computed, not which."""


def hparams_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the name and the settings of an optimizer, ready for JSON; with its name before each if there are several.

    >>> import torch
    >>> hparams_of(torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9))["momentum"]
    0.9
    """
    made = each_of(optimizer)
    told: dict[str, Any] = {"optimizer": "+".join(type(one).__name__ for one in made)}
    for one in made:
        prefix = f"{type(one).__name__}." if len(made) > 1 else ""
        values = {key: value for key, value in one.defaults.items() if key not in _IMPLEMENTATION}
        rates = list(dict.fromkeys(_plain(group["lr"]) for group in one.param_groups if "lr" in group))
        values |= {"lr": rates[0] if len(rates) == 1 else rates} if rates else {}
        told |= {f"{prefix}{key}": _plain(value) for key, value in values.items()}
    return told


def _plain(value: Any) -> Any:
    """A value for JSON; what JSON has no word for as text."""
    if isinstance(value, Tensor):
        return value.tolist() if value.numel() < 8 else f"tensor of {tuple(value.shape)}"  # sync: when a guard is made
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)[:200]
