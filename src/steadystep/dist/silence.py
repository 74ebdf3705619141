"""The log of a rank that leaves logging to rank 0."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, final

from steadystep.records import Diagnosis, Outcome

if TYPE_CHECKING:
    from steadystep.track import GradientSample


@final
class Silence:
    """Writes and says nothing: what rank 0 writes down is what all ranks agreed on."""

    wants_samples = False

    def sampled(self, sample: "GradientSample") -> None:
        """Rank 0 has it."""

    def record(self, outcome: Outcome) -> None:
        """Rank 0 has it."""

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Rank 0 has it."""

    def volunteered(self, step: int, diagnosis: Diagnosis) -> None:
        """Rank 0 says it."""

    def concluded(self, diagnosis: Diagnosis | None) -> None:
        """Rank 0 says it."""

    def close(self) -> None:
        """Nothing is open."""
