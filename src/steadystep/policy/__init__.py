"""DECIDE: from a diagnosis to a plan. Pure, so that every rank decides alike."""

from steadystep.policy.budget import Budget
from steadystep.policy.ladder import decide

__all__ = ["Budget", "decide"]
