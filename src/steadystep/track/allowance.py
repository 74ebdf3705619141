"""How much of a file something may take: a sum to begin with, and more with every step."""

from typing import final


@final
class Allowance:
    """Bytes that may be spent. What is not used is saved up."""

    def __init__(self, start: float, per_step: float) -> None:
        self._start = start
        self._per_step = per_step
        self._left = start
        self._last: int | None = None

    def grant(self, size: int, step: int, *, reserve: float = 0.0) -> bool:
        """Whether `size` bytes may be written at `step`, with that share of the first sum left; they then count."""
        if self._last is not None and step > self._last:
            self._left += self._per_step * (step - self._last)
        self._last = step
        if size > self._left - reserve * self._start:
            return False
        self._left -= size
        return True
