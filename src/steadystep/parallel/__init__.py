"""Agreement between ranks: every rank decides from the same numbers, so every rank decides the same."""

from steadystep.parallel.ranks import Ranks, SingleProcess, sections
from steadystep.parallel.setup import Meeting, Once, ranks_of, unwrapped

__all__ = ["Meeting", "Once", "Ranks", "SingleProcess", "ranks_of", "sections", "unwrapped"]
