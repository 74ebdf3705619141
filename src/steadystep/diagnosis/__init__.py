"""EXPLAIN: from findings to a cause, the reach of the damage, and advice."""

from steadystep.diagnosis.casebook import Casebook
from steadystep.diagnosis.causes import ADVICE, Cause
from steadystep.diagnosis.evidence import Evidence, Verdict
from steadystep.diagnosis.explain import exception_in_step, explain, not_repeatable
from steadystep.diagnosis.testimony import LASTING, first_sign, needs_witness, weigh

__all__ = [
    "ADVICE",
    "LASTING",
    "Casebook",
    "Cause",
    "Evidence",
    "Verdict",
    "exception_in_step",
    "explain",
    "first_sign",
    "needs_witness",
    "not_repeatable",
    "weigh",
]
