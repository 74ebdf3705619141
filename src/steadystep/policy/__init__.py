"""DECIDE: from a diagnosis to a plan. Pure, so that every rank decides alike."""

from steadystep.policy.budget import Budget
from steadystep.policy.early_stopping import EarlyStopping
from steadystep.policy.episode import Episode
from steadystep.policy.ladder import Mode, decide, has_broken_weights, restorable
from steadystep.policy.limits import Limits

__all__ = ["Budget", "EarlyStopping", "Episode", "Limits", "Mode", "decide", "has_broken_weights", "restorable"]
