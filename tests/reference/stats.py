"""Slow, obvious twins of the streaming estimators: everything is kept, and read anew."""

import math
from fractions import Fraction


class SlowLevel:
    """Median and upward sigma of the last `size` accepted values, read at every one of the first 32 and every 16th."""

    def __init__(self, size: int, *, armed_after: int, patience: int) -> None:
        self.size, self.armed_after, self.patience = size, armed_after, patience
        self.values: list[float] = []
        self.rejected: list[float] = []
        self.unread = 0
        self.median = self.spread = math.nan

    @property
    def armed(self) -> bool:
        return len(self.values) >= self.armed_after

    def accept(self, value: float) -> None:
        if not math.isfinite(value):
            return
        self.values = [*self.values, value][-self.size :]
        self.rejected = []
        self.unread += 1
        if len(self.values) <= 32 or self.unread == 16:
            self.read()

    def reject(self, value: float, *, agreement: float) -> bool:
        if not math.isfinite(value):
            return False
        self.rejected = [*self.rejected, value][-self.patience :]
        moved = len(self.rejected) == self.patience and max(self.rejected) - min(self.rejected) <= agreement
        if moved:
            self.start_again(self.rejected)
        return moved

    def start_again(self, values: list[float]) -> None:
        copies: list[float] = []
        while values and len(copies) < self.armed_after:
            copies = copies + values
        self.values, self.rejected = copies[-self.size :], []
        self.median = self.spread = math.nan
        if self.values:
            self.read()

    def read(self) -> None:
        self.unread = 0
        self.median = at_share(self.values, Fraction(1, 2), above=True)
        self.spread = at_share(self.values, Fraction(8413, 10000)) - self.median


def at_share(values: list[float], share: Fraction, *, above: bool = False) -> float:
    """The value whose place among n in order is the nearest to `share` of n - 1; `above` takes the upper middle."""
    ordered, last = sorted(values), len(values) - 1
    place = math.ceil(share * last) if above else math.floor(share * last + Fraction(1, 2))
    return ordered[place]


def cusum(values: list[float], *, slack: float, cap: float) -> tuple[float, int]:
    """The largest sum of any stretch that ends now, or 0; and for how many values it has been above 0."""
    steps = [0.0 if math.isnan(z) else min(z, cap) - slack for z in values]
    sums = [max(0.0, *(sum(steps[start : end + 1]) for start in range(end + 1))) for end in range(len(steps))]
    since = 0
    for value in sums:
        since = since + 1 if value > 0.0 else 0
    return (sums[-1] if sums else 0.0), since


def tail_limit(values: list[float], *, above: float) -> float:
    """What one value in ten million passes, if those beyond `above` are exponential; from the last 64 of them."""
    beyond = [(i, value - above) for i, value in enumerate(values, 1) if value > above][-64:]
    if not beyond:
        return above
    seen = len(values) - (beyond[0][0] if len(beyond) == 64 else 0)
    rate = min(len(beyond) / max(seen, 1), 1.0)
    upper = math.fsum(excess for _, excess in beyond) / len(beyond) * (1.0 + 2.0 / math.sqrt(len(beyond)))
    return above + upper * max(math.log(rate * 1e7), 0.0)
