"""EXPLAIN: from findings to a cause, the reach of the damage, and advice."""

from steadystep._deprecated import old_names
from steadystep.diagnosis.advice import ADVICE
from steadystep.diagnosis.causes import Cause, Fault
from steadystep.diagnosis.counterfactual import (
    LASTING,
    RollbackTrial,
    RollbackTrialResult,
    first_sign,
    needs_counterfactual,
    weigh,
)
from steadystep.diagnosis.explain import exception_in_step, explain, not_repeatable
from steadystep.diagnosis.run_history import RunHistory

__all__ = [
    "ADVICE",
    "LASTING",
    "Cause",
    "Fault",
    "RollbackTrial",
    "RollbackTrialResult",
    "RunHistory",
    "exception_in_step",
    "explain",
    "first_sign",
    "needs_counterfactual",
    "not_repeatable",
    "weigh",
]

__getattr__ = old_names(__name__)
