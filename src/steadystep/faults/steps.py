"""Sets of steps, made from others."""

from collections.abc import Container
from dataclasses import dataclass
from typing import final

import torch


@final
@dataclass(frozen=True, slots=True)
class AnyOf:
    """Every step that is in one of the parts."""

    parts: tuple[Container[int], ...]

    def __contains__(self, step: object) -> bool:
        return any(step in part for part in self.parts)


@final
@dataclass(frozen=True, slots=True)
class WithEves:
    """The steps, and the one before each: for what needs to see the step before."""

    steps: Container[int]

    def __contains__(self, step: object) -> bool:
        return step in self.steps or (isinstance(step, int) and step + 1 in self.steps)


@final
@dataclass(frozen=True, slots=True)
class OnRank:
    """The steps on one rank of a distributed run, and none elsewhere. Without one, this process is rank 0."""

    steps: Container[int]
    rank: int

    def __contains__(self, step: object) -> bool:
        # why: asked anew each time, because faults may be made before the process group is
        return self.rank == _rank() and step in self.steps


def _rank() -> int:
    ranks = torch.distributed
    return ranks.get_rank() if ranks.is_available() and ranks.is_initialized() else 0
