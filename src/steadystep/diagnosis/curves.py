"""Reading a loss curve: where it began, where it is, how noisy it is, whether anything was learned."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Self, final

from steadystep.records import Probe
from steadystep.stats import DIFFERENCE_SIGMA

_BLOCKS = 8
_FEWEST = 32  # points
# Above ten the logarithms lie so close together that any level would be near one.
_MOST_CLASSES = 10
_COMMON_CLASSES = (100, 1000)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve:
    """A loss curve in a few numbers. Levels are medians of eighths of the run."""

    start: float
    """The first loss or the median of the first few, whichever is lower: a run may explode within a few steps."""
    best: float
    late: float
    """The last eighth."""
    noise: float
    """Sigma between neighbouring points of the second half; a trend does not widen it."""
    settled: bool
    """The second half shows no trend."""
    lowest: float
    highest: float

    @classmethod
    def read(cls, first: Sequence[float], losses: Sequence[float]) -> Self | None:
        """None for a curve too short to say anything."""
        if len(losses) < _FEWEST:
            return None
        size = len(losses) / _BLOCKS
        levels = [median(losses[round(i * size) : round((i + 1) * size)]) for i in range(_BLOCKS)]
        half = losses[len(losses) // 2 :]
        noise = median(abs(b - a) for a, b in pairwise(half)) / DIFFERENCE_SIGMA
        middle, late = sum(levels[4:6]) / 2, sum(levels[6:]) / 2
        return cls(
            start=min(first[0], median(first)),
            best=min(levels),
            late=levels[-1],
            noise=noise,
            settled=abs(late - middle) <= max(3.0 * noise / math.sqrt(size), 0.005 * abs(late)),
            lowest=min(losses),
            highest=max(losses),
        )

    @property
    def learned(self) -> bool:
        """It has been lower than at the start by more than half its noise, and by more than one per cent."""
        return self.start - self.best > max(0.5 * self.noise, 0.01 * abs(self.start))

    @property
    def near_best(self) -> bool:
        """It is about as low as it has ever been."""
        return self.late - self.best <= max(2.0 * self.noise, 0.05 * abs(self.best), 0.05 * (self.start - self.best))

    @property
    def rose(self) -> bool:
        """It is well above where it began."""
        return self.late - self.start > max(3.0 * self.noise, 0.1 * abs(self.start))


def guessing(level: float, *, precision: float) -> int | None:
    """The number of classes, up to ten or a common one, whose guessing costs about `level` nats."""
    if not 0.5 < level < 8.0:
        return None
    classes = round(math.exp(level))
    if classes > _MOST_CLASSES:
        classes = min(_COMMON_CLASSES, key=lambda common: abs(level - math.log(common)))
    excess = level - math.log(classes)
    return classes if -precision <= excess <= 0.006 * level + precision else None


_MOST_PROBES = 128


@final
class Layers:
    """Update-to-weight ratios over the run, and the first and the last probe as they are.

    Biases start at zero and change by their whole size, so they do not count unless there is nothing else.
    """

    __slots__ = ("_stride", "_until", "first", "highest", "last", "ratios")

    def __init__(self) -> None:
        self._stride = 1
        self._until = 0
        self.ratios: list[float] = []
        """Median over the tensors, of every n-th probe."""
        self.highest = 0.0
        """The largest ratio of any tensor in those probes."""
        self.first: Probe | None = None
        self.last: Probe | None = None

    def add(self, probe: Probe) -> None:
        """One more probe."""
        self.last = probe
        self.first = self.first or probe
        self._until -= 1
        if self._until > 0:
            return
        self._until = self._stride
        ratios = update_ratios(probe)
        if ratios:
            self.ratios.append(median(ratios))
            self.highest = max(self.highest, *ratios)
        if len(self.ratios) == _MOST_PROBES:
            del self.ratios[1::2]
            self._stride *= 2

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "stride": self._stride,
            "until": self._until,
            "ratios": list(self.ratios),
            "highest": self.highest,
            "first": None if self.first is None else self.first.to_json(),
            "last": None if self.last is None else self.last.to_json(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._stride, self._until = int(state["stride"]), int(state["until"])
        self.ratios = [float(ratio) for ratio in state["ratios"]]
        self.highest = float(state["highest"])
        self.first = None if state["first"] is None else Probe.from_json(state["first"])
        self.last = None if state["last"] is None else Probe.from_json(state["last"])


def update_ratios(probe: Probe) -> list[float]:
    """How much of its size each weight changed by; all tensors when there are only biases."""
    found = {}
    for name, weight, update in zip(probe.names, probe.weight_rms, probe.update_rms, strict=False):
        if weight > 0.0 and math.isfinite(update / weight):
            found[name] = update / weight
    return [ratio for name, ratio in found.items() if not is_bias(name)] or list(found.values())


def is_bias(name: str) -> bool:
    """By its name, as torch spells it."""
    return "bias" in name.rpartition(".")[2]
