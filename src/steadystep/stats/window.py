"""The last N values, kept sorted: any quantile at any time for a fraction of a microsecond."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from typing import Any, final


@final
class Window:
    """A sliding window with quantiles. Values that are not finite are refused, so that they cannot spoil the order.

    >>> window = Window(3)
    >>> for value in (5.0, 1.0, 2.0, 3.0):
    ...     window.push(value)
    >>> window.median
    2.0
    """

    __slots__ = ("_order", "_sorted", "size")

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self.size = size
        self._order: deque[float] = deque()
        self._sorted: list[float] = []
        for value in values:
            self.push(value)

    def __len__(self) -> int:
        return len(self._order)

    def push(self, value: float) -> None:
        """One more; the oldest goes when the window is full."""
        if not math.isfinite(value):
            raise ValueError(f"a window holds finite numbers, got {value}")
        if len(self._order) == self.size:
            oldest = self._order.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
        self._order.append(value)
        insort(self._sorted, value)

    def quantile(self, share: float) -> float:
        """The value that about `share` of the window lies below; the window must not be empty."""
        return self._sorted[int(share * (len(self._sorted) - 1) + 0.5)]

    @property
    def median(self) -> float:
        """The middle value."""
        return self._sorted[len(self._sorted) // 2]

    @property
    def largest(self) -> float:
        """The largest value."""
        return self._sorted[-1]

    @property
    def smallest(self) -> float:
        """The smallest value."""
        return self._sorted[0]

    def values(self) -> list[float]:
        """In the order they came."""
        return list(self._order)

    def clear(self) -> None:
        """Forget everything."""
        self._order.clear()
        self._sorted.clear()

    def state_dict(self) -> list[float]:
        """JSON-ready state."""
        return list(self._order)

    def load_state_dict(self, state: Iterable[Any]) -> None:
        """Continue from `state`."""
        self._order = deque(float(value) for value in state)
        self._sorted = sorted(self._order)
