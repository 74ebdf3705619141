"""The steps that a declared fault names: `at`, and how long it lasts."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from steadystep.faults.since import since

_AT = "expected a step such as 500, a list [500, 510], a range '500-520' or {start: 500, steps: 20}"
_LASTS = "expected a number of steps from 1 on, or 'ever'"


@final
@dataclass(frozen=True, slots=True)
class When:
    """Stretches of steps, in the order they were given."""

    stretches: tuple[range, ...]

    def __contains__(self, step: object) -> bool:
        return any(step in stretch for stretch in self.stretches)

    @property
    def first(self) -> int:
        """The earliest step."""
        return min(stretch.start for stretch in self.stretches)


@final
class WhenError(ValueError):
    """A key that does not name steps."""

    def __init__(self, key: str, value: object, expected: str) -> None:
        super().__init__(f".{key} = {value!r}: {expected}")


def read_when(entry: Mapping[str, Any], *, lasts: int | str = 1) -> When:
    """The steps of one declaration; `lasts` holds where it does not say how long.

    >>> read_when({"at": "500-502"}).stretches
    (range(500, 503),)
    >>> 10**6 in read_when({"at": 500, "for": "ever"})
    True
    """
    if "at" not in entry:
        raise ValueError(f": the key 'at' is missing, {_AT}")
    if "for" in entry and "steps" in entry:
        raise ValueError(": 'for' and 'steps' mean the same, give one of them")
    key = "for" if "for" in entry else "steps"
    at, how_long = entry["at"], entry.get(key, lasts)
    if isinstance(at, str | Mapping):
        if key in entry:
            raise WhenError(key, how_long, "'at' says already how long it lasts")
        return When((_stretch(at),))
    starts = at if isinstance(at, Sequence) else [at]
    if not starts or not all(_is_step(start) for start in starts):
        raise WhenError("at", at, _AT)
    return When(tuple(_lasting(start, how_long, key) for start in starts))


def _stretch(at: str | Mapping[str, Any]) -> range:
    if isinstance(at, str):
        found = re.fullmatch(r"\s*([0-9]+)\s*-\s*([0-9]+)\s*", at)
        if found is None or int(found[1]) > int(found[2]):
            raise WhenError("at", at, _AT)
        return range(int(found[1]), int(found[2]) + 1)
    if not _is_step(at.get("start")) or set(at) - {"start", "steps"}:
        raise WhenError("at", at, _AT)
    return _lasting(at["start"], at.get("steps", 1), "at.steps")


def _lasting(start: int, how_long: object, key: str) -> range:
    if how_long == "ever":
        return since(start)
    if isinstance(how_long, bool) or not isinstance(how_long, int) or how_long < 1:
        raise WhenError(key, how_long, _LASTS)
    return range(start, start + how_long)


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
