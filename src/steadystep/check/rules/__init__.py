"""The rules, a file for each kind of fault. Every one takes a `Context` and gives hits."""

from steadystep.check.context import RuleFunction
from steadystep.check.rules import (
    accumulation,
    clipping,
    decay,
    evaluation,
    heads,
    hidden_state,
    left_out,
    loss,
    modes,
    nan_filters,
    objects,
    other_network,
    precision,
    retained,
    settings,
    stepping,
    totals,
    train_data,
    warmups,
    zeroing,
)

_MODULES = (
    clipping,
    stepping,
    zeroing,
    accumulation,
    retained,
    precision,
    loss,
    hidden_state,
    totals,
    heads,
    evaluation,
    train_data,
    modes,
    warmups,
    settings,
    decay,
    nan_filters,
    objects,
    other_network,
    left_out,
)
ALL: tuple[RuleFunction, ...] = tuple(module.check for module in _MODULES)
