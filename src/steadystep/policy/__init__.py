"""DECIDE: which response a diagnosis gets (`ladder.py`), from which snapshots, within which budget (`budget.py`)."""

from steadystep.policy.budget import Budget, EarlyStopping, Limits
from steadystep.policy.ladder import Mode, decide, has_broken_weights
from steadystep.policy.trusted_snapshots import Episode, restorable

__all__ = ["Budget", "EarlyStopping", "Episode", "Limits", "Mode", "decide", "has_broken_weights", "restorable"]
