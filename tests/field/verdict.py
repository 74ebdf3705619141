"""What a row means: whether steadystep stayed out of the way, did harm, or helped."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Row = dict[str, Any]
Comparison = Literal["better", "equal", "worse"]
MIN_GAIN = 0.1
"""A healthy program ends at least this share better than its untrained weights."""


def better_by(score: float, than: float, *, higher_is_better: bool) -> float:
    """How much better one score is than another; a run without a finite score is the worst there is."""
    if not math.isfinite(score) or not math.isfinite(than):
        return (
            0.0 if math.isfinite(score) == math.isfinite(than) else math.copysign(math.inf, math.isfinite(score) - 0.5)
        )
    return score - than if higher_is_better else than - score


def compared(score: float, than: float, *, spread: float, higher_is_better: bool) -> Comparison:
    """Better or worse only beyond what another seed would make of it."""
    gain = better_by(score, than, higher_is_better=higher_is_better)
    if gain > spread:
        return "better"
    return "worse" if gain < -spread else "equal"


def spread_of(scores: Sequence[float]) -> float:
    """Largest minus smallest; infinite where a seed did not end with a number, so that nothing can be told."""
    return max(scores) - min(scores) if all(math.isfinite(score) for score in scores) else math.inf


def fit(score: float, start: float, *, higher_is_better: bool, learning_judged: bool) -> bool:
    """Whether a plain program may be called healthy."""
    if not math.isfinite(score):
        return False
    gain = better_by(score, start, higher_is_better=higher_is_better)
    return not learning_judged or gain >= MIN_GAIN * abs(start)


def verdict(row: Mapping[str, Any]) -> Row:
    """The row's judgement, from what was measured."""
    sense = {"spread": row["spread"], "higher_is_better": row["higher_is_better"]}
    versus_plain = "equal" if row["identical"] else compared(row["guarded_score"], row["plain_score"], **sense)
    found: Row = {"versus_plain": versus_plain, "harm": versus_plain == "worse"}
    if row["fault"] is None:
        silent = not row["warnings"] and not row["acts"] and not row["error"]
        found["ok"] = bool(row["identical"] and silent and row["cause"].startswith("healthy"))
    else:
        found["benefit"] = versus_plain == "better"
        found["plain_versus_clean"] = compared(row["plain_score"], row["clean_score"], **sense)
        found["ok"] = not found["harm"]
    return found
