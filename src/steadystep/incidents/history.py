"""The last steps of a run, kept as they are and written down only when something goes wrong."""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import final

from steadystep.records import Outcome

_WITH_NORMS = 50  # newest steps that keep the norm of every tensor in the file; a large model has thousands


@final
class History:
    """A ring of outcomes. Adding one is an append to a deque; nothing is copied or formatted until it is written."""

    def __init__(self, length: int = 500) -> None:
        self._past: deque[Outcome] = deque(maxlen=length)

    def note(self, outcome: Outcome) -> None:
        """One more; the oldest is forgotten."""
        self._past.append(outcome)

    def __len__(self) -> int:
        return len(self._past)

    @property
    def last(self) -> Outcome | None:
        """The newest."""
        return self._past[-1] if self._past else None

    def lines(self) -> Iterator[str]:
        """One line of JSON each, oldest first: `Outcome.from_json` reads them."""
        old = len(self._past) - _WITH_NORMS
        for i, outcome in enumerate(self._past):
            signals = outcome.signals
            if i < old and signals is not None and signals.norms:
                outcome = replace(outcome, signals=replace(signals, names=(), norms=()))
            yield outcome.to_json()
