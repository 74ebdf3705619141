"""A wish that was granted counts once, not until the next agreement."""

from typing import final

from steadystep.dist.ranks import Ranks, Wish


@final
class Once:
    """Asks a granted wish again only after all ranks have agreed again."""

    def __init__(self, ranks: Ranks, granted: Wish) -> None:
        self._ranks = ranks
        self._granted = granted
        self._heard = 0

    def __call__(self) -> bool:
        """Whether it was granted since this was asked last."""
        fresh, self._heard = self._ranks.agreements != self._heard, self._ranks.agreements
        return fresh and self._granted()
