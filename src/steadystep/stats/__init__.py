"""Streaming estimators: plain numbers, safe with NaN, learning only what they are given, resumable through JSON."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
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
        """Return the state, ready for JSON."""
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
        """Return the state, ready for JSON."""
        return list(self._order)

    def load_state_dict(self, state: Iterable[Any]) -> None:
        """Continue from `state`."""
        self._order = deque(float(value) for value in state)
        self._sorted = sorted(self._order)


_REMEMBERED = 64  # exceedances
_ONCE_IN = 1e7  # values: what is rarer than that did not come from this tail


@final
class Tail:
    """Exceedances over `above`, their rate and their mean excess; `limit` is what one value in ten million passes.

    A Pareto tail of norms is an exponential one of their logarithms, so light tails give a low limit and heavy tails a
    high one. Without exceedances there is no tail to follow. With few of them the mean is uncertain and is taken at its
    upper end; where a light tail is expected, `light` exceedances of nothing are counted beside them, so that a single
    one that hardly counts as such does not make the limit infinite.

    >>> tail = Tail(above=1.0)
    >>> for value in (0.0,) * 95 + (2.0,) * 5:
    ...     tail.learn(value)
    >>> round(tail.limit, 1)
    25.9
    """

    __slots__ = ("_above", "_excess", "_light", "_seen")

    def __init__(self, *, above: float, light: int = 0) -> None:
        self._above = above
        self._light = light
        self._excess: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)
        self._seen = 0

    def learn(self, value: float) -> None:
        """One value that was accepted."""
        self._seen += 1
        if value > self._above:
            self._excess.append((self._seen, value - self._above))

    @property
    def limit(self) -> float:
        """No value of this run should pass it; `above` where none has exceeded that yet."""
        count = len(self._excess)
        if not count:
            return self._above
        since = self._excess[0][0] if count == _REMEMBERED else 0
        rate = count / max(self._seen - since, count)
        counted = count + self._light
        mean = sum(excess for _, excess in self._excess) / counted * (1.0 + 2.0 / math.sqrt(counted))
        return self._above + mean * max(math.log(rate * _ONCE_IN), 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {"seen": self._seen, "excess": [list(pair) for pair in self._excess]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._seen = int(state["seen"])
        self._excess.clear()
        self._excess.extend((int(at), float(excess)) for at, excess in state["excess"])


@final
class Cusum:
    """S = max(0, S + min(z, cap) - slack). `since` is how many values ago S last was zero: where the shift began.

    The cap keeps one wild value from raising the alarm alone.

    >>> sum_ = Cusum(slack=0.5, cap=4.0)
    >>> [sum_.add(z) for z in (0.0, 2.0, 2.0, 100.0, -9.0)]
    [0.0, 1.5, 3.0, 6.5, 0.0]
    """

    __slots__ = ("cap", "since", "slack", "value")

    def __init__(self, *, slack: float, cap: float) -> None:
        self.slack = slack
        self.cap = cap
        self.value = 0.0
        self.since = 0

    def add(self, z: float) -> float:
        """One standardised value; returns the sum. NaN counts as no evidence."""
        step = min(z, self.cap) - self.slack if z == z else 0.0
        self.value += step
        if self.value > 0.0:
            self.since += 1
        else:
            self.reset()
        return self.value

    def reset(self) -> None:
        """Back to zero."""
        self.value = 0.0
        self.since = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {"value": self.value, "since": self.since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.value, self.since = float(state["value"]), int(state["since"])
