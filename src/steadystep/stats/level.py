"""What a value usually is and how far it usually strays upwards, from those that were accepted."""

import math
from collections import deque
from typing import Any, final

ONE_SIGMA = 0.8413
"""The share of a normal distribution below mean + sigma."""
SIGMA_PER_MAD = 1.4826
"""Of a normal distribution, over the median distance from its median."""
DIFFERENCE_SIGMA = 0.954
"""The median distance of neighbours in a normal sequence, in sigma."""
_REFRESH = 16  # accepted values


@final
class Level:
    """Median and upward spread of the last `size` accepted values, brought up to date every few of them.

    One-sided on purpose: values far below the median (a lucky batch, a zero gradient) must not widen the limit above
    it. A window follows slow drift by itself. It does not learn outliers, so a real shift of the level would stay an
    outlier for ever: `reject` collects outliers and says when `patience` of them in a row agree with each other.

    Sorting every sixteenth time instead of keeping the window sorted makes the usual call cost 0.2 us.

    >>> level = Level(armed_after=3)
    >>> for value in (1.0, 2.0, 3.0, 2.0):
    ...     level.accept(value)
    >>> level.armed, level.median
    (True, 2.0)
    """

    __slots__ = ("_rejected", "_since", "_values", "armed_after", "median", "patience", "spread")

    def __init__(self, size: int = 128, *, armed_after: int = 24, patience: int = 12) -> None:
        self._values: deque[float] = deque(maxlen=size)
        self._rejected: list[float] = []
        self._since = 0
        self.armed_after = armed_after
        self.patience = patience
        self.median = math.nan
        """The usual value."""
        self.spread = math.nan
        """One sigma upwards."""

    @property
    def armed(self) -> bool:
        """Enough was seen to judge by."""
        return len(self._values) >= self.armed_after

    def accept(self, value: float) -> None:
        """Learn from a value that was judged normal. What is not finite is not learned."""
        if value - value != 0.0:
            return
        self._values.append(value)
        self._since += 1
        if self._since >= _REFRESH or len(self._values) <= 32:
            self._refresh()
        if self._rejected:
            self._rejected.clear()

    def reject(self, value: float, *, agreement: float, moves: bool = True) -> bool:
        """Note an outlier. True when the last `patience` of them lie within `agreement`: the level has moved there.

        Without `moves` it is left where it is, for somebody who wants to see more first.
        """
        if not math.isfinite(value):
            return False
        self._rejected.append(value)
        del self._rejected[: -self.patience]
        if len(self._rejected) < self.patience or max(self._rejected) - min(self._rejected) > agreement:
            return False
        if moves:
            self.start_again(self._rejected)
        return True

    def start_again(self, values: "list[float] | tuple[float, ...]" = ()) -> None:
        """Forget the old level; learn the new one from `values`, counted often enough to be armed at once."""
        times = -(-self.armed_after // len(values)) if values else 0
        kept = list(values) * times
        self._values.clear()
        self._values.extend(kept)
        self._rejected = []
        self.median = self.spread = math.nan
        if kept:
            self._refresh()

    @property
    def rejected_in_a_row(self) -> int:
        """Outliers since the last accepted value, at most `patience`."""
        return len(self._rejected)

    def _refresh(self) -> None:
        ordered = sorted(self._values)
        self.median = ordered[len(ordered) // 2]
        self.spread = ordered[int(ONE_SIGMA * (len(ordered) - 1) + 0.5)] - self.median
        self._since = 0

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {
            "values": list(self._values),
            "rejected": list(self._rejected),
            "since": self._since,
            "usual": [self.median, self.spread] if self._values else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._values.clear()
        self._values.extend(float(value) for value in state["values"])
        self._rejected = [float(value) for value in state["rejected"]]
        self._since = int(state["since"])
        self.median, self.spread = state["usual"] or (math.nan, math.nan)


LARGEST = 1e30  # fp32 ends at 3.4e38
_ENDS = (3.4028234663852886e38, 3.3895313892515355e38, 1.7976931348623157e308)  # of fp32, bf16 and fp64


def is_absurd(value: float) -> bool:
    """Whether no training comes to such a number; the end of a format, which masks are filled with, is meant.

    >>> is_absurd(1e38), is_absurd(float("inf")), is_absurd(1e6), is_absurd(3.4028234663852886e38)
    (True, True, False, False)
    """
    return not abs(value) <= LARGEST and abs(value) not in _ENDS
