"""Numbers that a call was given: the value to work with, or an error that names the key, the value and what is right.

Any real number and any integer type will do (NumPy's too); True and False are neither.
"""

import math
import numbers
import operator
from collections.abc import Mapping
from typing import Any, TypeGuard

from steadystep.errors import ConfigError


def is_number(value: object) -> TypeGuard[float]:
    """A finite number; True and False are none."""
    return not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(_float(value))


def is_whole(value: object) -> TypeGuard[int]:
    """An integer; True and False are none."""
    return not isinstance(value, bool) and isinstance(value, numbers.Integral)


def real(key: str, value: object, *, above: float = -math.inf, most: float = math.inf) -> float:
    """A finite number, greater than `above` and at most `most`."""
    number = math.nan if isinstance(value, bool) or not isinstance(value, numbers.Real) else _float(value)
    if math.isfinite(number) and above < number <= most:
        return number
    start = "" if above == -math.inf else f" greater than {above:g}"
    end = "" if most == math.inf else f" and at most {most:g}"
    shown = "a number beyond all bounds" if number == math.inf and isinstance(value, int) else repr(value)
    raise ConfigError(f"{key} = {shown}: must be a finite number{start}{end}")


def fraction(key: str, value: object) -> float:
    """A number between 0 and 1, neither of them."""
    number = real(key, value, above=0.0)
    if number >= 1.0:
        raise ConfigError(f"{key} = {value!r}: must be between 0 and 1")
    return number


def whole(key: str, value: object, *, least: int) -> int:
    """A whole number, `least` or more."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        hint = f" (write {int(value)})" if isinstance(value, float) and value.is_integer() else ""
        raise ConfigError(f"{key} = {value!r}: must be a whole number, {least} or more{hint}")
    return number


def state_keys(owner: str, state: Mapping[str, Any], *expected: str) -> None:
    """Refuse a state that another class or version wrote."""
    if not isinstance(state, Mapping):
        raise ConfigError(f"not a state of {owner}: give what its state_dict() gave, not {type(state).__name__}")
    if set(state) != set(expected):
        raise ConfigError(f"not a state of {owner}: keys {sorted(state)}, expected {sorted(expected)}")


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf
