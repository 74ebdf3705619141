"""What a value usually is and how far it usually strays upwards, from those that were accepted."""

import math
from typing import Any, final

from steadystep.stats.window import Window

_ONE_SIGMA = 0.8413  # the share of a normal distribution below mean + sigma


@final
class Level:
    """Median and upward spread over the last `size` accepted values.

    One-sided on purpose: values far below the median (a lucky batch, a zero gradient) must not widen the limit above
    it. A window follows slow drift by itself. It does not learn outliers, so a real shift of the level would stay an
    outlier for ever: `reject` collects outliers and says when `patience` of them in a row agree with each other.
    """

    __slots__ = ("_rejected", "armed_after", "patience", "window")

    def __init__(self, size: int = 128, *, armed_after: int = 24, patience: int = 12) -> None:
        self.window = Window(size)
        self.armed_after = armed_after
        self.patience = patience
        self._rejected: list[float] = []

    @property
    def armed(self) -> bool:
        """Enough was seen to judge by."""
        return len(self.window) >= self.armed_after

    @property
    def median(self) -> float:
        """The usual value; NaN before the first one."""
        return self.window.median if len(self.window) else math.nan

    def spread(self, floor: float = 0.0) -> float:
        """One sigma upwards, at least `floor`."""
        return max(self.window.quantile(_ONE_SIGMA) - self.window.median, floor) if len(self.window) else math.nan

    def accept(self, value: float) -> None:
        """Learn from a value that was judged normal."""
        self.window.push(value)
        if self._rejected:
            self._rejected.clear()

    def reject(self, value: float, *, agreement: float) -> bool:
        """Note an outlier. True when the last `patience` ones lie within `agreement`: the level has moved there."""
        self._rejected.append(value)
        del self._rejected[: -self.patience]
        if len(self._rejected) < self.patience or max(self._rejected) - min(self._rejected) > agreement:
            return False
        self.window.clear()
        for kept in self._rejected:
            self.window.push(kept)
        # why: twelve values give a poor spread; doubled, they arm the detector again at once
        for kept in list(self._rejected):
            self.window.push(kept)
        self._rejected.clear()
        return True

    @property
    def rejected_in_a_row(self) -> int:
        """Outliers since the last accepted value, at most `patience`."""
        return len(self._rejected)

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"window": self.window.state_dict(), "rejected": list(self._rejected)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.window.load_state_dict(state["window"])
        self._rejected = [float(value) for value in state["rejected"]]
