"""How far the outliers of a run reach: an exponential tail of logarithms (Hill 1975), from those that were accepted."""

import math
from collections import deque
from typing import Any, final

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
        """JSON-ready state."""
        return {"seen": self._seen, "excess": [list(pair) for pair in self._excess]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._seen = int(state["seen"])
        self._excess.clear()
        self._excess.extend((int(at), float(excess)) for at, excess in state["excess"])
