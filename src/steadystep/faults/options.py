"""What a key of a fault may hold: each reader returns the value to use, or a ValueError says what it expects."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

_WORDS = {"nan": math.nan, "inf": math.inf, "+inf": math.inf, "-inf": -math.inf}


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
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
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
    if isinstance(value, str) and value.lower() in _WORDS:
        return _WORDS[value.lower()]
    value = _as_yaml_means_it(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("expected a number, 'nan', 'inf' or '-inf'")
    return float(value)


def whole(value: object) -> int:
    """Of either sign."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("expected a whole number")
    return value


def power(value: object) -> int:
    """An exponent of two that fp32 can hold."""
    if not -126 <= whole(value) <= 126:
        raise ValueError("expected a whole number from -126 to 126")
    return whole(value)


def count(value: object) -> int:
    """0 or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("expected a whole number from 0 on")
    return value


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


def bit(value: object) -> int | Literal["any"] | None:
    """A position from the lowest bit, "top" of the exponent, or "any"."""
    if value == "top":
        return None
    if value == "any":
        return "any"
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 64:
        raise ValueError("expected a bit from 0 to 63, 'top' or 'any'")
    return value
