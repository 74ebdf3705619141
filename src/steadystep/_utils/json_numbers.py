"""Numbers in JSON, which has no word for NaN and infinity.

What we write for ourselves (records, run logs) holds them as the texts "NaN", "Infinity" and "-Infinity", as JavaScript
and pydantic spell them. What we print or keep for others (`--json`, a manifest) holds them as Python's "nan", "inf" and
"-inf", which `float()` reads. Both are read everywhere, in any case. Where a number is only to be drawn or compared,
there is null instead.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

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


def as_list(values: Sequence[float], digits: int = 6) -> str:
    """Many of them, as the text of a JSON list."""
    total = sum(values)
    if total - total == 0.0:  # all finite
        return "[" + ",".join([f"{value:.{digits}g}" for value in values]) + "]"
    return json.dumps([as_json(value, digits) for value in values], separators=(",", ":"))


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
