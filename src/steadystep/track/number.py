"""A number, to the log and back. JSON has no word for what is not finite; the log has."""

import json
import math
from collections.abc import Sequence

LARGEST_STEP = 2**62
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def as_json(value: float, digits: int = 9) -> float | str:
    """To so many significant digits; nine give back any fp32 value exactly."""
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
    if isinstance(value, str) and value in _WORDS:
        return _WORDS[value]
    raise TypeError("not a number")


def step_of(value: object) -> int:
    """Raises TypeError for what is not a step."""
    if type(value) is not int or not 0 <= value < LARGEST_STEP:
        raise TypeError("not a step")
    return value


def count_of(value: object) -> int:
    """A number of things; 0 for anything else."""
    return value if type(value) is int and 0 < value < LARGEST_STEP else 0
