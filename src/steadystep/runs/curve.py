"""The curve a doctor looks at, prepared once: finite points, their usual level and noise, its start and its end."""

from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

from steadystep.runs.levels import (
    Excursion,
    Floats,
    blocks,
    excursions,
    means,
    noise,
    spread,
    trailing_median,
    trailing_noise,
)
from steadystep.runs.run import Run, Series
from steadystep.runs.table import higher_is_better

_SHARE = 0.45  # of the variance, at one frequency and its multiples
_STANDS_OUT = 2.1  # times what noise of the same kind has there
_CYCLES = 5  # in what is looked at; slower ones are bends of the curve
_DEGREE = 4
_SEGMENTS = 8
_MOST = 1 << 17  # points


def cycle(values: Floats) -> tuple[float, float] | None:
    """Period in points and height from bottom to top of a swing that stands out; None without one."""
    if len(values) > _MOST:
        values = values[-_MOST:]
    rest = _without_trend(values)
    count = len(rest)
    power = np.abs(np.fft.rfft(rest * np.hanning(count))) ** 2
    power[:_CYCLES] = 0.0
    total = float(power.sum() + np.finfo(float).tiny)
    peak = int(np.argmax(power))
    if peak < _CYCLES:
        return None
    inside = np.zeros(len(power), dtype=bool)
    for multiple in (1, 2, 3):
        wide = max(2, round(0.06 * peak * multiple))
        inside[peak * multiple - wide : peak * multiple + wide + 1] = True
    # why not the plain share: noise that hangs together has much of its power at low frequencies, and in a short
    # curve the few frequencies inside are a good part of all there are
    expected = _of_noise(rest, len(power))
    chance = float(expected[inside].sum() / expected.sum())
    found = float(power[inside].sum()) / total
    share = (found - chance) / max(1.0 - chance, 1e-9)
    if share < _SHARE or found < _STANDS_OUT * chance:
        return None
    if not _lasts(rest, peak):
        return None
    spread = float(np.std(rest)) * np.sqrt(share)
    return count / peak, 2.0 * np.sqrt(2.0) * spread


def _of_noise(rest: Floats, count: int) -> Floats:
    """The spectrum of noise in which each point keeps as much of the last one as here: sigma² / |1 - rho e^-iw|²."""
    keeps = min(max(float(rest[1:] @ rest[:-1]) / max(float(rest @ rest), np.finfo(float).tiny), 0.0), 0.98)
    expected = 1.0 / (1.0 - 2.0 * keeps * np.cos(np.linspace(0.0, np.pi, count)) + keeps * keeps)
    expected[:_CYCLES] = 0.0
    return np.asarray(expected)


def _lasts(rest: Floats, peak: int) -> bool:
    """It is there all along, not in one place: a single bump has low frequencies too."""
    spectrum = np.fft.rfft(rest)
    wide = max(3, round(0.06 * peak))
    spectrum[: max(0, peak - wide)] = 0.0
    spectrum[peak + wide + 1 :] = 0.0
    swings = np.fft.irfft(spectrum, len(rest)) ** 2
    parts = means(swings, _SEGMENTS)
    return bool(np.median(parts) > 0.25 * parts.mean())


def _without_trend(values: Floats) -> Floats:
    """Less a smooth curve; single outliers are brought down so that they do not ring at all frequencies."""
    times = np.linspace(-1.0, 1.0, len(values))
    middle = float(np.median(values))
    scale = spread(values, middle) or 1.0
    tame = np.clip((values - middle) / scale, -50.0, 50.0)
    rest = tame - np.polynomial.Chebyshev.fit(times, tame, _DEGREE)(times)
    reach = 4.0 * (spread(rest, 0.0) or 1.0)
    return np.asarray(np.clip(rest, -reach, reach) * scale)


def comes_down(values: Floats, swing: float) -> bool:
    """It still makes progress by more than the size of its swings, or the swings die away."""
    third = max(1, len(values) // 3)
    first, last = values[:third], values[-third:]
    fell = float(np.median(first) - np.median(last))
    calmer = float(np.std(last)) < 0.3 * float(np.std(first))
    return fell > 2.0 * swing or calmer


_FIRST = 5  # points
_FEWEST_SWINGING = 48  # points
_LONG = 8  # points
_SWING = 0.06  # of the level and of half the way: a smaller one is nobody's business
_SIGNED = 0.05  # of the later half on either side of zero


@final
@dataclass(frozen=True)
class Curve:
    """The training loss of a run; the error, where only an accuracy was logged."""

    run: Run
    name: str
    """What it is: "loss", or "1 - accuracy"."""
    raw: Series
    """As logged, NaN included."""
    steps: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    """Of the finite points."""
    values: Floats

    @classmethod
    def of(cls, run: Run) -> "Curve":
        """The curve to read; one without points when nothing was logged."""
        name, series = _main(run)
        finite = np.isfinite(series.values)
        values = np.clip(series.values[finite], -1e150, 1e150)  # so that differences and squares stay finite
        return cls(run=run, name=name, raw=series, steps=series.steps[finite], values=values)

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def base(self) -> Floats:
        """The usual value at each point, from those before it."""
        return trailing_median(self.values)

    @cached_property
    def sigma(self) -> Floats:
        """The usual noise at each point, from those before it."""
        return trailing_noise(self.values)

    @cached_property
    def start(self) -> float:
        """The first point or the median of the first few, whichever is higher."""
        return float(max(self.values[0], np.median(self.values[:_FIRST]))) if len(self) else 0.0

    @cached_property
    def levels(self) -> Floats:
        """Medians of up to 32 parts of four points or more."""
        return blocks(self.values, max(1, min(32, len(self) // 4)))

    @cached_property
    def best(self) -> float:
        """The lowest of the levels."""
        return float(self.levels.min())

    @cached_property
    def late(self) -> float:
        """The level of the last eighth."""
        return float(np.median(self.values[-max(4, len(self) // 8) :]))

    @cached_property
    def late_noise(self) -> float:
        """One sigma between neighbours in the second half."""
        return noise(self.values[len(self) // 2 :])

    @cached_property
    def progress(self) -> float:
        """How far it has come down, at best; never negative."""
        return max(self.start - self.best, 0.0)

    @cached_property
    def signed(self) -> bool:
        """Values on both sides of zero, as with policy gradients: then the level means little."""
        half = self.values[len(self) // 2 :]
        return bool(len(half)) and min((half > 0.0).mean(), (half < 0.0).mean()) > _SIGNED

    @cached_property
    def excursions(self) -> list[Excursion]:
        """Where it was far above its level."""
        if len(self) < 2:
            return []
        return excursions(self.values, base=self.base, sigma=self.sigma, start=self.start)

    @cached_property
    def swing(self) -> tuple[float, float] | None:
        """Period in points and height of swings that take the place of progress in the last three quarters."""
        values = self.values[len(self) // 4 :]
        found = cycle(values) if len(values) >= _FEWEST_SWINGING else None
        long = sum(one.length >= _LONG for one in self.excursions)
        if found is None or 1 <= long <= 2:  # one bump or two are no cycle
            return None
        level = abs(float(np.median(values)))
        return (
            found if found[1] >= _SWING * max(level, 0.5 * self.progress) and not comes_down(values, found[1]) else None
        )

    @cached_property
    def warm(self) -> int:
        """The number of points in which the learning rate was still rising; the first fiftieth when it is unknown."""
        return _warm_up(self)


def error_of(name: str, series: Series) -> Series:
    """As something that should go down: an accuracy as its error, a loss as it is."""
    if not higher_is_better(name):
        return series
    finite = series.values[np.isfinite(series.values)]
    low, top = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    whole = 1.0 if low >= 0.0 and top <= 1.0 else (100.0 if low >= 0.0 and 1.5 < top <= 100.0 else 0.0)
    return Series(series.steps, whole - series.values)


def _main(run: Run) -> tuple[str, Series]:
    if len(run.loss):
        return "loss", run.loss
    for name, series in run.metrics.items():
        if higher_is_better(name) and len(series):
            return f"error ({name})", error_of(name, series)
    for name, series in run.validation.items():
        if len(series) and ("loss" in name.lower() or higher_is_better(name)):
            return name, error_of(name, series)
    return "loss", run.loss


def _warm_up(curve: Curve) -> int:
    count = len(curve)
    lr = curve.run.lr
    rates = lr.values[np.isfinite(lr.values)]
    if len(rates) < 3:
        return min(max(8, count // 50), 200, count)
    top = int(np.argmax(rates >= 0.98 * rates.max()))
    if top == 0 or rates[0] > 0.7 * rates[top]:
        return min(count, 8)
    return int(np.searchsorted(curve.steps, lr.steps[np.isfinite(lr.values)][top]))
