"""What a learning-rate sweep showed."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import final

from pydantic import ConfigDict

from steadystep.records import Record

_ROWS, _BAR = 24, 30


class Verdict(StrEnum):
    """How far the curve can be trusted."""

    FOUND = "found"
    OPEN_ENDED = "open-ended"
    LIMIT_ONLY = "limit-only"
    FLAT = "flat"
    DIVERGES_AT_ONCE = "diverges-at-once"
    NOT_FINITE = "not-finite"


_MEANING = {
    Verdict.FOUND: "the loss fell, then ran away",
    Verdict.OPEN_ENDED: "the loss fell and never ran away: a larger max_lr may show a larger stable rate",
    Verdict.LIMIT_ONLY: "the loss never fell beyond its noise before it ran away, so the suggestion is a tenth of the "
    "limit; more num_steps or a larger batch would show more",
    Verdict.FLAT: "the loss did nothing at any rate: is it connected to these parameters, is max_lr too small, or is "
    "the noise larger than what so few steps can learn?",
    Verdict.DIVERGES_AT_ONCE: "the loss ran away in the first steps: lower min_lr, or look for the fault elsewhere",
    Verdict.NOT_FINITE: "the very first loss was not finite: no learning rate cures that",
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LRCurve(Record):
    """The sweep and what it says. Rates are those of the group at the optimizer's default; others keep their ratio.

    >>> told = {"verdict": Verdict.FOUND, "suggested": 0.5, "largest_stable": 1.0}
    >>> print(LRCurve(lrs=(0.1, 1.0), losses=(2.0, 1.0), smoothed=(2.0, 1.0), **told))
    learning rate       loss
    1.0e-01                2  ##############################
    1.0e+00                1    <- suggested  <- largest stable
    suggested: 5.00e-01
    largest stable: 1.00e+00
    verdict: found: the loss fell, then ran away
    """

    __pydantic_config__ = ConfigDict(ser_json_inf_nan="strings", extra="forbid")

    lrs: tuple[float, ...]
    losses: tuple[float, ...]
    """As seen, before the step at that rate."""
    smoothed: tuple[float, ...]
    verdict: Verdict
    suggested: float | None = None
    """A rate to train with; None when the curve shows none."""
    largest_stable: float | None = None
    """Where the loss was lowest (verdict `limit-only`: the last rate at which it was not yet up)."""

    @property
    def meaning(self) -> str:
        """The verdict in a sentence."""
        return _MEANING[self.verdict]

    def __str__(self) -> str:
        lines = [f"{'learning rate':<15} {'loss':>8}"]
        lines += [self._row(i) for i in self._shown()]
        for name, rate in (("suggested", self.suggested), ("largest stable", self.largest_stable)):
            lines += [f"{name}: {rate:.2e}"] if rate is not None else []
        return "\n".join([*lines, f"verdict: {self.verdict.value}: {self.meaning}"])

    def _shown(self) -> list[int]:
        every = max(1, math.ceil(len(self.lrs) / _ROWS))
        return sorted({*range(0, len(self.lrs), every), *self._marks().values()})

    def _marks(self) -> dict[str, int]:
        """The row nearest to each of the two rates."""
        named = {"suggested": self.suggested, "largest stable": self.largest_stable}
        return {
            name: min(range(len(self.lrs)), key=lambda i: abs(math.log(self.lrs[i] / rate)))
            for name, rate in named.items()
            if rate is not None
        }

    def _row(self, i: int) -> str:
        finite = [loss for loss in self.smoothed if math.isfinite(loss)]
        bar = ""
        if math.isfinite(self.smoothed[i]) and max(finite) > min(finite):
            bar = "#" * round(_BAR * (self.smoothed[i] - min(finite)) / (max(finite) - min(finite)))
        marks = "".join(f"  <- {name}" for name, row in self._marks().items() if row == i)
        return f"{self.lrs[i]:<15.1e} {self.smoothed[i]:>8.4g}  {bar}{marks}".rstrip()
