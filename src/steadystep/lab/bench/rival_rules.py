"""Rules that other systems ship, written anew from their papers and documents: as alarms, and as acts in a loop.

Each is faithful where it hurts: what the original does with a NaN, this does too.
"""

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, final

from steadystep.lab.bench.rival_rule import (
    COORDINATE_LIMIT,
    FINE,
    UNIT_LIMIT,
    RivalAction,
    RivalRule,
    RuleAlarm,
    Sample,
    Spam,
    clip_units,
    shrink_updates,
)


@final
class Above:
    """An alarm wherever `measure` exceeds `limit`; it is then that the rule acts."""

    def __init__(self, measure: Callable[[Sample], float], limit: float) -> None:
        self._measure, self._limit = measure, limit

    def update(self, seen: Sample) -> RuleAlarm:
        """Learns nothing."""
        return RuleAlarm(alarm=True) if self._measure(seen) > self._limit else FINE


@final
class FixedClip:
    """As `torch.nn.utils.clip_grad_norm_`: a NaN norm makes every gradient NaN, an infinite one zeroes finite ones."""

    def __init__(self, max_norm: float = 1.0) -> None:
        self._max_norm = max_norm

    def update(self, seen: Sample) -> RuleAlarm:
        """Above the limit it clips."""
        if seen.norm <= self._max_norm:
            return FINE
        return RuleAlarm(alarm=seen.norm > self._max_norm, scale=clip_factor(seen.norm, self._max_norm))


def clip_factor(norm: float, limit: float) -> float:
    """What torch multiplies with: NaN for a NaN norm, 0 for an infinite one.

    >>> clip_factor(4.0, 1.0), clip_factor(float("inf"), 1.0), clip_factor(0.5, 1.0)
    (0.24999993750001562, 0.0, 1.0)
    """
    factor = limit / (norm + 1e-6)
    return 1.0 if factor > 1.0 else factor


@final
class AdaGC:
    """100 steps of a fixed clip teach each tensor its smallest norm; then 1.05 times its average is the limit."""

    def __init__(
        self, *, relative: float = 1.05, beta: float = 0.98, warmup_steps: int = 100, max_norm: float = 1.0
    ) -> None:
        self._relative, self._beta, self._warmup_steps, self._max_norm = relative, beta, warmup_steps, max_norm
        self._levels: list[float] = []
        self._seen = 0

    def update(self, seen: Sample) -> RuleAlarm:
        """An alarm is a tensor that was clipped after the warm-up."""
        self._seen += 1
        if not self._levels:
            self._levels = [math.inf] * len(seen.norms)
        if self._seen <= self._warmup_steps:
            scale = clip_factor(seen.norm, self._max_norm)
            self._levels = [min(level, scale * x) for level, x in zip(self._levels, seen.norms, strict=True)]
            return RuleAlarm(scale=scale)
        limits = [self._relative * level for level in self._levels]
        scales = [1.0 if x <= limit or x == 0.0 else limit / x for x, limit in zip(seen.norms, limits, strict=True)]
        self._levels = [
            self._beta * level + (1 - self._beta) * s * x
            for level, s, x in zip(self._levels, scales, seen.norms, strict=True)
        ]
        return RuleAlarm(alarm=any(s < 1.0 for s in scales), scales=tuple(scales))


@final
class AutoClip:
    """This step's norm belongs to the history; once that holds a NaN, all limits and gradients are NaN."""

    def __init__(self, percentile: float = 10.0) -> None:
        self._share = percentile / 100.0
        self._sorted: list[float] = []
        self._poisoned = False

    def update(self, seen: Sample) -> RuleAlarm:
        """An alarm is a norm that was clipped."""
        if math.isnan(seen.norm):
            self._poisoned = True
        else:
            insort(self._sorted, seen.norm)
        limit = math.nan if self._poisoned else self._percentile()
        return RuleAlarm(alarm=seen.norm > limit, scale=clip_factor(seen.norm, limit))

    def _percentile(self) -> float:
        place = self._share * (len(self._sorted) - 1)
        below, above = self._sorted[math.floor(place)], self._sorted[math.ceil(place)]
        return below if below == above else below + (place - math.floor(place)) * (above - below)


@final
class KillLossSpike:
    """Only writes to the log unless told otherwise, so its verdict is an alarm and nothing else."""

    def __init__(
        self, *, num_steps: int = 2000, factor: float = 2.0, patience_steps: int = 4, loss_cap: float = 10.0
    ) -> None:
        self._window: deque[float] = deque(maxlen=max(100, round(num_steps * 0.05)))
        self._factor, self._patience_steps, self._loss_cap = factor, patience_steps, loss_cap
        self._high = 0

    def update(self, seen: Sample) -> RuleAlarm:
        """Silent until its window is full."""
        alarm = False
        full = self._window.maxlen
        if len(self._window) == full:
            mean = sum(self._window) / full
            self._high = self._high + 1 if seen.loss >= self._factor * mean else 0
            alarm = self._high > self._patience_steps
            alarm = alarm or sum(x > self._loss_cap for x in self._window) >= full / 2
        self._window.append(seen.loss)
        return RuleAlarm(alarm=True) if alarm else FINE


@final
class SkipStep:
    """What it judges enters the window of the steps after it, a NaN too: then nothing passes until that has left."""

    def __init__(self, *, window: int = 128, sigmas: float = 6.0) -> None:
        self._losses: deque[float] = deque(maxlen=window)
        self._norms: deque[float] = deque(maxlen=window)
        self._needed, self._sigmas = window // 2, sigmas

    def update(self, seen: Sample) -> RuleAlarm:
        """Silent until half a window is known, this step included."""
        known = len(self._losses) + 1 >= self._needed
        baseline = not known or (self._usual(seen.loss, self._losses) and self._usual(seen.norm, self._norms))
        self._losses.append(seen.loss)
        self._norms.append(seen.norm)
        return FINE if baseline else RuleAlarm(alarm=True, scale=0.0)

    def _usual(self, value: float, past: Sequence[float]) -> bool:
        mean = sum(past) / len(past)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in past) / (len(past) - 1)) if mean - mean == 0 else math.nan
        # why: asked in this way NaN is never usual, as in the original
        return value - mean <= self._sigmas * deviation


@final
class SpikeDetection:
    """Sees the loss after the update is done, so what it raises for has already landed."""

    def __init__(self, *, window: int = 10, relative: float = 2.0) -> None:
        self._losses: deque[float] = deque(maxlen=window)
        self._relative = relative

    def update(self, seen: Sample) -> RuleAlarm:
        """A loss that improves is never a spike."""
        if self._is_spike(seen.loss):
            return RuleAlarm(alarm=True, stop=True)
        self._losses.append(seen.loss)
        return FINE

    def _is_spike(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        if not self._losses or loss <= self._losses[-1]:
            return False
        mean = sum(self._losses) / len(self._losses)
        return abs(loss - mean) >= self._relative * abs(mean)


@final
class ZClip:
    """25 steps only teach it; from then on it learns every value, a NaN too. Above `max_norm` it clips in any case."""

    def __init__(
        self, *, z_limit: float = 2.5, alpha: float = 0.97, warmup_steps: int = 25, max_norm: float = 1.0
    ) -> None:
        self._z_limit, self._alpha, self._warmup_steps, self._max_norm = z_limit, alpha, warmup_steps, max_norm
        self._first: list[float] = []
        self._mean = self._variance = 0.0

    def update(self, seen: Sample) -> RuleAlarm:
        """An alarm is a z-score above the limit; the fixed limit clips without one."""
        if len(self._first) < self._warmup_steps:
            self._first.append(seen.norm)
            if len(self._first) == self._warmup_steps:
                self._mean = sum(self._first) / self._warmup_steps
                self._variance = sum((x - self._mean) ** 2 for x in self._first) / self._warmup_steps
            return RuleAlarm(scale=clip_factor(seen.norm, self._max_norm))
        sigma = math.sqrt(self._variance) if self._variance == self._variance else math.nan
        z = (seen.norm - self._mean) / (sigma + 1e-6)
        alarm = z > self._z_limit
        kept = self._mean + self._z_limit * sigma / (z / self._z_limit) if alarm else seen.norm
        self._mean = self._alpha * self._mean + (1 - self._alpha) * kept
        self._variance = self._alpha * self._variance + (1 - self._alpha) * (kept - self._mean) ** 2
        limit = min(kept, self._max_norm) if alarm else self._max_norm
        return RuleAlarm(alarm=alarm, scale=clip_factor(seen.norm, limit))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RuleInfo:
    """One rule: how it is made, and what an alarm of it leads to."""

    name: str
    about: str
    make: Callable[[int], RivalRule]
    """For a run of so many steps."""
    does: Literal["scale", "skip", "stop", "log", "touch"]
    touch: Callable[[], RivalAction] | None = None
    """With "touch": its act, which needs tensors."""
    only_adam: bool = False
    each_tensor: bool = False
    """Its act wants every tensor in a parameter group of its own."""


RULES: dict[str, RuleInfo] = {
    info.name: info
    for info in (
        RuleInfo(name="clip 1.0", about="global norm held to 1", make=lambda n: FixedClip(), does="scale"),
        RuleInfo(name="ZClip", about="norm: z > 2.5 is scaled down", make=lambda n: ZClip(), does="scale"),
        RuleInfo(
            name="SkipStep", about="loss or norm 6 sigma off: update times 0", make=lambda n: SkipStep(), does="skip"
        ),
        RuleInfo(
            name="KillLossSpike",
            about="loss at 2x its mean for 5 steps: a line in the log",
            make=lambda n: KillLossSpike(num_steps=n),
            does="log",
        ),
        RuleInfo(
            name="SpikeDetection",
            about="loss at 3x the mean of ten, or NaN: raises after the update",
            make=lambda n: SpikeDetection(),
            does="stop",
        ),
        RuleInfo(name="AdaGC", about="each tensor held to 1.05x its average", make=lambda n: AdaGC(), does="scale"),
        RuleInfo(name="AutoClip", about="norm held to its 10th percentile", make=lambda n: AutoClip(), does="scale"),
        RuleInfo(
            name="AGC",
            about="each row held to 1 % of its weights",
            make=lambda n: Above(lambda seen: seen.unit, UNIT_LIMIT),
            does="touch",
            touch=lambda: clip_units,
        ),
        RuleInfo(
            name="SPAM",
            about="each coordinate held to sqrt(5000 v), moments reset",
            make=lambda n: Above(lambda seen: seen.coordinate, COORDINATE_LIMIT),
            does="touch",
            touch=Spam,
            only_adam=True,
        ),
        RuleInfo(
            name="StableAdamW",
            about="each tensor's rate over its RMS_t",
            make=lambda n: Above(lambda seen: seen.surprise, 1.0),
            does="touch",
            touch=lambda: shrink_updates,
            only_adam=True,
            each_tensor=True,
        ),
    )
}
"""By name. torch's GradScaler is not among them: it is part of every fp16 run here, guarded or not."""

__all__ = ["RULES", "RivalAction", "RivalRule", "RuleAlarm", "RuleInfo", "Sample"]
