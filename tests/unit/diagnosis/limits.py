"""Runs that are described by numbers, and signs at their limits: said with one value, silent with another.

    At(sign, {"target.std": 60.0, "end": 2.0}, {"target.std": (50.0, 49.9), "opposed": (False, True)})

is a sign that holds in the run of the first table. For each row of the second it still holds with the first value in
place, and no longer with the second; a list gives several such pairs, and `...` stands for what it has anyway. Where a
sign goes by shares of a loss, `relative=True` tries all of it with losses four times as large, too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from steadystep.diagnosis.facts import Facts
from steadystep.diagnosis.measured import Measured
from steadystep.records import BatchStats, InputStats, Probe, Structure, WeightStats
from tests.unit.diagnosis.made import facts, tallies
from tests.unit.diagnosis.test_mechanisms import outputs, part

_INPUTS = {"batches": 4, "mean": 0.0, "std": 1.0, "largest": 3.0, "constant_share": 0.0, "scale_spread": 1.0}
_DIRECT = ("opposed", "scaled", "ratios", "highest_ratio", "setup", "incidents", "done", "norms", "lrs")
OPEN = {
    "entropy": 1.0,
    "variance": 1.0,
    "deviation": 1.0,
    "huber": 1.0,
    "std": 1.0,
    "mean": 0.0,
}  # a base of 1, whatever the loss
_MISSING: tuple[dict[str, Any], ...] = (
    {"trail.last": None},
    {"trail.first": None, "trail.last": None, "trail.count": 0},
    {"curve": None},
    {"batch": None},
    {"heard": False},
    {"batch": None, "heard": False},
    {"kind": ""},
    {"losses": [1.0] * 20},
    {"losses": []},
    {"opposed": True},
    {"measured.rewarded": True},
)
_BASES = ("entropy", "variance", "deviation", "huber", "binary")


class Story:
    """The run that a table describes.

    `start` and `end` are the losses of its halves, `updates` their number, `base` the loss of a constant prediction.
    `part.name` is a field: of the `target`, the `input`, the `first`, `last` or all `outputs`, the `trail`, `batch`,
    `structure`, `loop`, `measured`, `curve`, `probe`, `first_probe`, `inputs`, `initial`. All losses, and what a
    constant prediction would have, are `size` times what the table says.
    """

    def __init__(self, said: Mapping[str, Any], size: float = 1.0) -> None:
        self._said, self._size = said, size

    def get(self, name: str, default: Any) -> Any:
        return self._said.get(name, default)

    def of(self, *owners: str) -> dict[str, Any]:
        """Fields of these, the later ones first."""
        found: dict[str, Any] = {}
        for owner in owners:
            found |= {
                name.partition(".")[2]: value for name, value in self._said.items() if name.startswith(f"{owner}.")
            }
        return found

    def facts(self) -> Facts:
        """All of it."""
        updates = self.get("updates", 256)
        start, end = self.get("start", 1.0), self.get("end", 1.0)
        losses = self.get("losses", [start] * (updates // 2) + [end] * (updates - updates // 2))
        losses = [self._size * loss for loss in losses]
        more = {name: self._said[name] for name in _DIRECT if name in self._said}
        for name in ("warned", "noted"):
            more[name] = tallies(*self.get(name, ())) if not isinstance(self.get(name, ()), dict) else self.get(name, 0)
        if self.get("ratio", None) is not None:
            more["ratios"] = (self.get("ratio", 0.0),) * 8
        for name, step in (("probe", 200), ("first_probe", 1)):
            if self.of(name):
                more[name] = Probe(**{"step": step} | self.of(name))
        if self.of("inputs"):
            more["inputs"] = InputStats(**_INPUTS | {"finite": True} | self.of("inputs"))
        kept = Structure(**{"trained": ("0.weight", "2.weight")} | self.of("structure"))
        made = facts(losses, measured=self._measured(), structure=kept, **more)
        if "curve" in self._said:
            made = replace(made, curve=self._said["curve"])
        known = made.curve is not None and self.of("curve")
        return replace(made, curve=replace(made.curve, **self.of("curve"))) if known else made

    def _measured(self) -> Measured:
        made = Measured()
        kind, named = self.get("kind", "mse"), self.get("kind_of", "[1]")
        fields = {"binary": 0.0} | OPEN | self.of("target")
        fields |= {name: self._size * fields[name] for name in _BASES}
        heard = part("['target']", **fields) if self.get("heard", True) else None
        given = (part("[0]", **{"whole": False} | self.of("input")), part(**{"name": named} | fields))
        made.batch = BatchStats(**{"batches": 20, "parts": given} | self.of("batch"))
        if "batch" in self._said:
            made.batch = self._said["batch"]
        trail, plain = made.outputs, {"kind": kind, "target": heard}
        trail.first = outputs(**plain | self.of("outputs", "first"))
        trail.last = outputs(**plain | self.of("outputs", "last"))
        trail.count, trail.matches = 8, {f"{kind} of {named}": 8} if kind else {}
        trail.lowest, trail.highest = trail.last.smallest, trail.last.largest
        for owner, seen in (("trail", trail), ("measured", made), ("loop", made.loop)):
            for name, value in self.of(owner).items():
                setattr(seen, name, value)
        trail.pairs = [(self._size * whole, self._size * value) for whole, value in trail.pairs]
        if "trail.count" in self._said and kind:
            trail.matches = {f"{kind} of {named}": trail.count}
        if self.of("initial"):
            made.initial = WeightStats(**self.of("initial"))
        return made


def run(said: Mapping[str, Any] | None = None, *, size: float = 1.0, **more: Any) -> Facts:
    """The facts of the run that a table describes."""
    return Story({**(said or {}), **more}, size).facts()


@dataclass(frozen=True)
class At:
    """A sign, a run in which it holds, and its limits."""

    sign: Callable[[Facts], object]
    given: dict[str, Any]
    limits: dict[str, Any] = field(default_factory=dict)
    also: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = ()
    """Limits of several values together."""
    relative: bool = False
    """It goes by shares of a loss."""

    def __str__(self) -> str:
        return self.sign.__name__

    def pairs(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Changes with which it still holds, beside those with which it does not."""
        found = list(self.also)
        for name, values in self.limits.items():
            for yes, no in values if isinstance(values, list) else [values]:
                found.append(({} if yes is ... else {name: yes}, {name: no}))
        return found

    def check(self) -> None:
        """Try all of them."""
        for size in (1.0, 4.0) if self.relative else (1.0,):
            assert self.sign(run(self.given, size=size)), f"it is not said at all, at {size:g} times the loss"
            for yes, no in self.pairs():
                assert self.sign(run(self.given | yes, size=size)), f"silent with {yes}, at {size:g} times the loss"
                said = self.sign(run(self.given | no, size=size))
                assert said in ("", None, False), f"said with {no}, at {size:g} times the loss"
        for missing in _MISSING:  # what was not measured is no error, whatever is said
            self.sign(run(self.given | missing))


def at_limits(*rows: At) -> pytest.MarkDecorator:
    """Run a test once for each sign."""
    return pytest.mark.parametrize("row", rows, ids=str)
