"""Agreement between ranks: every rank decides from the same numbers, so every rank decides the same."""

from steadystep.dist.alike import sections
from steadystep.dist.find import ranks_of, unwrapped
from steadystep.dist.meeting import Meeting
from steadystep.dist.once import Once
from steadystep.dist.ranks import Alone, Ranks
from steadystep.dist.silence import Silence

__all__ = ["Alone", "Meeting", "Once", "Ranks", "Silence", "ranks_of", "sections", "unwrapped"]
