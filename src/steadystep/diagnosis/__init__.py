"""EXPLAIN: from findings to a cause, the reach of the damage, and advice."""

from steadystep.diagnosis.causes import ADVICE, Cause
from steadystep.diagnosis.explain import explain, not_repeatable

__all__ = ["ADVICE", "Cause", "explain", "not_repeatable"]
