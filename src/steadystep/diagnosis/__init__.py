"""EXPLAIN: from findings to a cause, the reach of the damage, and advice."""

from steadystep.diagnosis.casebook import Casebook
from steadystep.diagnosis.causes import ADVICE, Cause
from steadystep.diagnosis.explain import explain, not_repeatable
from steadystep.diagnosis.testimony import first_sign, needs_witness, weigh

__all__ = ["ADVICE", "Casebook", "Cause", "explain", "first_sign", "needs_witness", "not_repeatable", "weigh"]
