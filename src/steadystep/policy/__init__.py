"""DECIDE: from a diagnosis to a plan. Pure, so that every rank decides alike."""

from steadystep.policy.budget import Budget, EarlyStopping, Limits
from steadystep.policy.ladder import Mode, decide, has_broken_weights
from steadystep.policy.trusted_snapshots import Episode, restorable

__all__ = ["Budget", "EarlyStopping", "Episode", "Limits", "Mode", "decide", "has_broken_weights", "restorable"]
