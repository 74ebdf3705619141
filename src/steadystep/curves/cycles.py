"""The one frequency that much of a curve's variance lies at, if there is one."""

import numpy as np

from steadystep.curves.levels import Floats, means

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
    middle = np.median(values)
    scale = float(np.median(np.abs(values - middle))) * 1.4826 or 1.0
    tame = np.clip((values - middle) / scale, -50.0, 50.0)
    rest = tame - np.polynomial.Chebyshev.fit(times, tame, _DEGREE)(times)
    reach = 4.0 * (float(np.median(np.abs(rest))) * 1.4826 or 1.0)
    return np.asarray(np.clip(rest, -reach, reach) * scale)


def comes_down(values: Floats, swing: float) -> bool:
    """It still makes progress by more than the size of its swings, or the swings die away."""
    third = max(1, len(values) // 3)
    first, last = values[:third], values[-third:]
    fell = float(np.median(first) - np.median(last))
    calmer = float(np.std(last)) < 0.3 * float(np.std(first))
    return fell > 2.0 * swing or calmer
