"""The log of a rank that leaves logging to rank 0."""

from collections.abc import Mapping
from typing import final

from steadystep.records import Outcome


@final
class Silence:
    """Writes and says nothing: what rank 0 writes down is what all ranks agreed on."""

    def record(self, outcome: Outcome) -> None:
        """Rank 0 has it."""

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Rank 0 has it."""

    def close(self) -> None:
        """Nothing is open."""
