"""Numbers from outside: those that a call was given, and those in JSON, which has no word for NaN and infinity.

A call is given the value to work with, or an error that names the key, the value and what is right. Any real number and
any integer type will do (NumPy's too); True and False are neither.

What we write for ourselves (records, run logs) holds NaN and infinity as the texts "NaN", "Infinity" and "-Infinity",
as JavaScript and pydantic spell them. What we print or keep for others (`--json`, a manifest) holds them as Python's
"nan", "inf" and "-inf", which `float()` reads. Both are read everywhere, in any case. Where a number is only to be
drawn or compared, there is null instead.
"""

import json
import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import median
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
    shown = "a number out of range" if number == math.inf and isinstance(value, int) else repr(value)
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
        raise ConfigError(f"{key} = {value!r}: must be an integer of at least {least}{hint}")
    return number


def state_keys(owner: str, state: Mapping[str, Any], *expected: str) -> None:
    """Refuse a state that another class or version wrote."""
    if not isinstance(state, Mapping):
        raise ConfigError(f"not a state of {owner}: pass what its state_dict() returned, got {type(state).__name__}")
    if set(state) != set(expected):
        raise ConfigError(f"not a state of {owner}: keys {sorted(state)}, expected {sorted(expected)}")


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf


_WORDS = {
    **dict.fromkeys(("nan",), math.nan),
    **dict.fromkeys(("inf", "+inf", "infinity", "+infinity"), math.inf),
    **dict.fromkeys(("-inf", "-infinity"), -math.inf),
}


def as_json(value: float, digits: int = 9) -> float | str:
    """To so many significant digits, or its word; nine digits give back any fp32 value exactly."""
    if math.isfinite(value):
        return float(f"{value:.{digits}g}")
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def as_list(values: Sequence[float]) -> str:
    """Many of them to six digits, as the text of a JSON list."""
    total = sum(values)
    if total - total == 0.0:  # all finite
        return "[" + ",".join([f"{value:.6g}" for value in values]) + "]"
    return json.dumps([as_json(value, 6) for value in values], separators=(",", ":"))


def from_json(value: object) -> float:
    """Raises TypeError for what is not a number."""
    if type(value) is float or type(value) is int:
        return float(value)
    if isinstance(value, str) and (word := number_word(value)) is not None:
        return word
    raise TypeError("not a number")


def number_word(text: str) -> float | None:
    """NaN or an infinity written as a word; None for any other text.

    >>> number_word("NaN"), number_word("-Infinity"), number_word("1.5")
    (nan, -inf, None)
    """
    return _WORDS.get(text.lower())


def with_words(value: Any) -> Any:
    """Something to print as JSON, with what is not finite as Python's text for it, however deep it is.

    >>> with_words({1: (0.5, float("inf"))})
    {'1': [0.5, 'inf']}
    """
    if isinstance(value, dict):
        return {str(key): with_words(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [with_words(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def or_null(value: Any) -> Any:
    """None for a number that is not finite; anything else as it is."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_lines(lines: list[bytes]) -> list[Any]:
    """Each line's value, None for one that is not JSON."""
    try:
        # why all at once: one call is three times as quick as one per line
        found: list[Any] = json.loads(b"[" + b",".join(lines) + b"]")
        if len(found) == len(lines):
            return found
    except (ValueError, RecursionError):
        pass
    return [_json_or_none(line) for line in lines]


def _json_or_none(line: bytes) -> Any:
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError):
        return None


def mean_by_weight(values: Sequence[float], weights: Sequence[float]) -> float:
    """Of those with a weight; NaN where none has.

    >>> mean_by_weight((1.0, 3.0, math.nan), [1.0, 3.0, 0.0])
    2.5
    """
    counted = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight > 0]
    if not counted:
        return math.nan
    return sum(value * weight for value, weight in counted) / sum(weight for _, weight in counted)


_UNIFORM = 0.01  # of a factor
_SMALL = 1e-3  # of the largest: what is smaller may be rounding


def common_factor(now: Sequence[float], then: Sequence[float]) -> float:
    """The factor between these norms, NaN without a common one; by size, because their order may be another."""
    factor = math.hypot(*now) / math.hypot(*then) if len(now) == len(then) and any(then) else math.nan
    large = [(a, b) for a, b in zip(sorted(now), sorted(then), strict=False) if b > _SMALL * max(then)]
    return factor if all(abs(a / b / factor - 1.0) <= _UNIFORM for a, b in large) else math.nan


_WINDOW = 16  # points before a change, and after it
_RESCALED, _ALIKE = 3.0, 1.5  # of a level; factors closer than this are taken for one


@lru_cache(maxsize=4)
def rescaled_at(
    losses: tuple[float, ...], norms: tuple[float, ...], lrs: tuple[float, ...]
) -> tuple[int, float] | None:
    """Return where the loss was multiplied by a factor between two points, and the factor, or None.

    Its gradient is multiplied by the same one at once, both stay there, and the learning rate has not moved. A run that
    diverges takes several steps, and its gradients grow by another factor than its losses.
    """
    if min(losses, default=0.0) <= 0.0:
        return None
    for at in range(_WINDOW, len(losses) - _WINDOW + 1):
        if max(losses[at] / losses[at - 1], losses[at - 1] / losses[at]) < _ALIKE:
            continue
        before, after = losses[at - _WINDOW : at], losses[at : at + _WINDOW]
        factor, of_norms = median(after) / median(before), _ratio(norms[at - _WINDOW : at + _WINDOW])
        apart = max(after) < min(before) or min(after) > max(before)
        stays = all(1.0 / _ALIKE < _ratio(each) < _ALIKE for each in (before, after))
        rates = lrs[at - _WINDOW : at + _WINDOW]
        same = 1.0 / _ALIKE < of_norms / factor < _ALIKE and max(rates) < _ALIKE * min(rates)
        if apart and stays and same and max(factor, 1.0 / factor) >= _RESCALED:
            return at, factor
    return None


def _ratio(values: Sequence[float]) -> float:
    """The median of the second half over that of the first."""
    before, after = median(values[: len(values) // 2]), median(values[len(values) // 2 :])
    return after / before if before > 0.0 else math.inf
