"""The learning rate when the effective batch changes.

`linear`: lr * k for a batch k times as large (Goyal et al. 2017), for SGD. `sqrt`: lr * sqrt(k) (Krizhevsky 2014;
Malladi et al. 2022 derive it for Adam and RMSprop). Both are rules of thumb that end at some batch size, and neither
replaces the warmup that large batches need.
"""

import math
from typing import Literal

from steadystep.errors import ConfigError

Rule = Literal["linear", "sqrt"]


def scale_lr(lr: float, *, batch_size: float, base_batch_size: float, rule: Rule = "linear") -> float:
    """The rate for `batch_size` where `lr` was right for `base_batch_size`, counted in examples or tokens per update.

    >>> scale_lr(0.1, batch_size=1024, base_batch_size=256)
    0.4
    >>> scale_lr(0.1, batch_size=1024, base_batch_size=256, rule="sqrt")
    0.2
    """
    for name, value in (("lr", lr), ("batch_size", batch_size), ("base_batch_size", base_batch_size)):
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} = {value!r}: must be greater than 0 and finite")
    if rule not in ("linear", "sqrt"):
        raise ConfigError(f"rule = {rule!r} is unknown: use 'linear' (SGD) or 'sqrt' (Adam and its kin)")
    times = batch_size / base_batch_size
    return lr * (times if rule == "linear" else math.sqrt(times))
