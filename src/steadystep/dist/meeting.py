"""All ranks make their guards together: what one of them finds wrong, all raise."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

from steadystep.dist.alike import Sections
from steadystep.dist.find import ranks_of
from steadystep.dist.ranks import Ranks
from steadystep.errors import ConfigError, SteadystepError


@final
class Meeting:
    """Held once for each guard: with what is compared, or with the mistake that kept this rank from comparing."""

    def __init__(self) -> None:
        self._over = False

    def compare(self, ranks: Ranks, sections: Sections, *, wrong: str = "") -> None:
        """Raise on every rank when one has something to say, or they differ.

        Raises:
            ConfigError: with the same words everywhere.
        """
        self._over = True
        said = ranks.compare(sections, wrong=wrong)
        if said:
            raise ConfigError(said)

    @contextmanager
    def telling(self, model: Any) -> Iterator[None]:
        """Around what may fail on this rank alone: the others are told."""
        try:
            yield
        except SteadystepError as error:
            self.fail(model, error)
            raise

    def fail(self, model: Any, error: Exception) -> None:
        """This rank could not make its guard; the others are told, unless they know."""
        if self._over:
            return
        self._over = True
        try:
            ranks = ranks_of(model)
        except Exception:  # what was given is no model: there is nobody to be found through it
            return
        nothing: Mapping[str, Mapping[str, str]] = {}
        ranks.compare(nothing, wrong=str(error) or type(error).__name__)
