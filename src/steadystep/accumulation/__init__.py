"""Micro-batches that share one update: their arithmetic, and running them again when one of them was bad."""

from steadystep.accumulation.group import Group, MicroBatch
from steadystep.accumulation.passes import Passes
from steadystep.accumulation.recipe import Closure, Taped, Work

__all__ = ["Closure", "Group", "MicroBatch", "Passes", "Taped", "Work"]
