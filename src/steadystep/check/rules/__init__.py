"""The rules, a file for each kind of fault. Every one takes a `Context` and gives hits."""

from steadystep.check.context import RuleFunction
from steadystep.check.rules import (
    accumulation,
    clipping,
    evaluation,
    heads,
    loss,
    modes,
    objects,
    precision,
    retained,
    settings,
    stepping,
    totals,
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
    totals,
    heads,
    evaluation,
    modes,
    settings,
    objects,
)
ALL: tuple[RuleFunction, ...] = tuple(module.check for module in _MODULES)
