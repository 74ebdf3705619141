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
    settings,
    stepping,
)

ALL: tuple[RuleFunction, ...] = tuple(
    module.check
    for module in (clipping, stepping, accumulation, precision, loss, heads, evaluation, modes, settings, objects)
)
