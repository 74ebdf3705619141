"""Values of a fault's options: each reader returns the value to use, or a ValueError names what is expected."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from steadystep._utils.numbers import is_number, is_whole, number_word
from steadystep.errors import MisuseError
from steadystep.faults.fault import draw, pick_layer, since


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One key: how it is read, what holds without it, and what it is for."""

    read: Callable[[object], Any]
    default: Any
    about: str


def number(value: object) -> float:
    """Finite."""
    value = _as_yaml_means_it(value)
    if not is_number(value):
        raise ValueError("expected a finite number")
    return float(value)


def _as_yaml_means_it(value: object) -> object:
    """YAML 1.1 reads 1e6 as text."""
    try:
        return float(value) if isinstance(value, str) and value.strip()[:1] in "+-.0123456789" else value
    except ValueError:
        return value


def positive(value: object) -> float:
    """Finite and above 0."""
    if number(value) <= 0:
        raise ValueError("expected a number above 0")
    return number(value)


def any_number(value: object) -> float:
    """NaN and infinities too, also as words, because JSON has none for them."""
    if isinstance(value, str) and (word := number_word(value)) is not None:
        return word
    value = _as_yaml_means_it(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("expected a number, 'nan', 'inf' or '-inf'")
    return float(value)


def whole(value: object) -> int:
    """Of either sign."""
    if not is_whole(value):
        raise ValueError("expected an integer")
    return int(value)


def power(value: object) -> int:
    """An exponent of two that fp32 can hold."""
    if not -126 <= whole(value) <= 126:
        raise ValueError("expected an integer from -126 to 126")
    return whole(value)


def count(value: object) -> int:
    """0 or more."""
    if not is_whole(value) or value < 0:
        raise ValueError("expected an integer of at least 0")
    return int(value)


def name(value: object) -> str:
    """Not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError("expected a name")
    return value


def name_or_position(value: object) -> str | int:
    """A name, or a number counted from 0 or, if negative, from the end."""
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise ValueError("expected a name or a position")
    return value


def names(value: object) -> tuple[str, ...]:
    """One or several."""
    several = [value] if isinstance(value, str) else value
    if not isinstance(several, Sequence) or not several or not all(isinstance(n, str) and n for n in several):
        raise ValueError("expected a name or a list of names")
    return tuple(several)


def bit(value: object) -> int | str | None:
    """A position from the lowest bit, "top" of the exponent, or where it is drawn from."""
    if value == "top":
        return None
    if isinstance(value, str) and value in ("any", "sign", "exponent", "mantissa"):
        return value
    if not is_whole(value) or not 0 <= value < 64:
        raise ValueError("expected a bit from 0 to 63, 'top', 'sign', 'exponent', 'mantissa' or 'any'")
    return value


def one_of(*words: str) -> Callable[[object], str]:
    """A reader of one of these words."""

    def read(value: object) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError(f"expected one of {', '.join(words)}")
        return value

    return read


def stuck_at(value: object) -> int | None:
    """0 or 1; None for a bit that flips."""
    if value is not None and (not is_whole(value) or value not in (0, 1)):
        raise ValueError("expected 0 or 1")
    return value


def switch(value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


_AT = "expected a step such as 500, a list [500, 510], a range '500-520' or {start: 500, steps: 20}"
_LASTS = "expected a number of steps of at least 1, or 'ever'"


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
        raise ValueError(": 'for' and 'steps' mean the same: use one of them")
    key = "for" if "for" in entry else "steps"
    at, how_long = entry["at"], entry.get(key, lasts)
    if isinstance(at, str | Mapping):
        if key in entry:
            raise WhenError(key, how_long, "'at' already gives the duration")
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
    if not is_whole(how_long) or how_long < 1:
        raise WhenError(key, how_long, _LASTS)
    return range(start, start + how_long)


def _is_step(value: object) -> bool:
    return is_whole(value) and value >= 0


def layer_of(model: nn.Module, layer: str | int | None, seed: int) -> nn.Module:
    """Return the layer with this name or position; None draws one from `seed`."""
    if layer is not None:
        return pick_layer(model, layer)
    owners = [m for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
    if not owners:
        raise MisuseError("the model has no trainable parameter")
    return owners[draw(seed, 0, "layer", len(owners))]


def relu_biases(model: nn.Module) -> list[nn.Parameter]:
    """Return the biases of the layer nearest before each ReLU, in the order in which the model was built."""
    found: dict[int, nn.Parameter] = {}
    last: list[nn.Parameter] = []
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            found |= {id(bias): bias for bias in last}
        elif any(True for _ in module.parameters(recurse=False)):
            last = [p for name, p in module.named_parameters(recurse=False) if name == "bias"]
    return list(found.values())


def own_biases(module: nn.Module) -> list[nn.Parameter]:
    """Return all biases inside a module."""
    return [p for name, p in module.named_parameters() if name.rpartition(".")[2] == "bias"]
