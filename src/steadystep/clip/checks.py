"""Settings and states a clip can work with, or an error that names the key, the value and what would be right."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from steadystep.errors import ConfigError


def real(key: str, value: object, *, above: float = 0.0, most: float = math.inf) -> float:
    """A finite number, greater than `above` and at most `most`."""
    number = _float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if math.isfinite(number) and above < number <= most:
        return number
    end = "" if most == math.inf else f" and at most {most:g}"
    shown = "a number beyond all bounds" if number == math.inf and isinstance(value, int) else repr(value)
    raise ConfigError(f"{key} = {shown}: must be a finite number greater than {above:g}{end}")


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf


def limit(key: str, value: object) -> None:
    """A number above 0; infinity only measures."""
    if not isinstance(value, float | int | Tensor | np.number) or not value > 0:
        raise ConfigError(f"{key} = {value!r}: must be a number greater than 0")


def share(key: str, value: object) -> float:
    """A number between 0 and 1, neither of them."""
    number = real(key, value)
    if number >= 1.0:
        raise ConfigError(f"{key} = {value!r}: must be between 0 and 1")
    return number


def count(key: str, value: object, *, least: int = 1) -> int:
    """A whole number, `least` or more."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    raise ConfigError(f"{key} = {value!r}: must be a whole number, {least} or more")


def level(key: str, value: object, *, most: float = math.inf) -> float:
    """Something learned from norms: a finite number, zero included."""
    return 0.0 if value == 0 else real(key, value, most=most)


def keys(owner: str, state: Mapping[str, Any], *expected: str) -> None:
    """Refuse a state that another class or version wrote."""
    if not isinstance(state, Mapping):
        raise ConfigError(f"not a state of {owner}: give what its state_dict() gave, not {type(state).__name__}")
    if set(state) != set(expected):
        raise ConfigError(f"not a state of {owner}: keys {sorted(state)}, expected {sorted(expected)}")
