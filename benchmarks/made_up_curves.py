"""Curves of runs that never were, made from a seed. Each shows one thing, in every size, scale and noise."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final, get_args

import numpy as np
from numpy.typing import NDArray

from steadystep.runs.run import Run, Series

CurveKind = Literal["overfitting", "gap", "plateau", "oscillation", "healthy"]
CURVE_KINDS: tuple[CurveKind, ...] = get_args(CurveKind)

Floats = NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True)
class _Shape:
    """Training and validation without noise, on a scale of 1, and how noisy each may be."""

    training: Floats
    validation: Floats
    noise: float
    validation_noise: float


def made_up(kind: CurveKind, seed: int, *, longest: int = 100_000) -> Run:
    """One run that shows `kind`: 100 to `longest` points, any cadence, scale 1e-3 to 1e5; now and then an accuracy."""
    rng = np.random.default_rng([CURVE_KINDS.index(kind), seed])
    count = int(math.exp(rng.uniform(math.log(100), math.log(longest))))
    checks = int(math.exp(rng.uniform(math.log(12), math.log(min(count, 400)))))
    times = (np.arange(count) + 1.0) / count
    at = np.linspace(count // checks, count - 1, checks).astype(int)
    shape = _SHAPES[kind](rng, times, times[at])
    loudest = 0.2 * float(shape.training.min())  # losses have no other side of zero
    training = shape.training + min(shape.noise, loudest) * _noise(rng, count)
    validation = shape.validation + min(shape.validation_noise, loudest) * _noise(rng, checks)
    if rng.random() < 0.5 and kind != "oscillation":
        training = training + _jumps(rng, count, 6.0 * shape.noise)
    every = int(rng.choice([1, 1, 5, 10, 50, 100]))
    steps = (np.arange(count, dtype=np.int64) + 1) * every
    if rng.random() < 0.2:
        whole = float(rng.choice([1.0, 100.0]))
        size = 0.9 * whole / max(1.0, float(shape.training.max()), float(shape.validation.max()))
        return _run(
            kind,
            seed,
            metrics={"accuracy": Series(steps, np.clip(whole - size * training, 0.0, whole))},
            validation={"val_accuracy": Series(steps[at], np.clip(whole - size * validation, 0.0, whole))},
        )
    scale = 10.0 ** rng.uniform(-3.0, 5.0)
    return _run(
        kind,
        seed,
        loss=Series(steps, scale * training),
        validation={"val_loss": Series(steps[at], scale * validation)},
    )


def _run(
    kind: str,
    seed: int,
    *,
    loss: Series | None = None,
    metrics: dict[str, Series] | None = None,
    validation: dict[str, Series],
) -> Run:
    name = f"{kind}-{seed}"
    return Run(
        name=name,
        path=Path(name),
        source="csv",
        loss=loss or Series(),
        metrics=metrics or {},
        validation=validation,
    )


def _noise(rng: np.random.Generator, count: int) -> Floats:
    """Sigma 1: normal, with heavy tails, or hanging together."""
    white: Floats = rng.standard_normal(count)
    form = rng.integers(3)
    if form == 1:
        heavy: Floats = rng.standard_t(5, count) / math.sqrt(5.0 / 3.0)
        return heavy
    if form == 2:
        keep = float(rng.uniform(0.1, 0.5))
        joined = np.convolve(white, keep ** np.arange(12), mode="full")[:count]
        return np.asarray(joined * math.sqrt(1.0 - keep * keep))
    return white


def _jumps(rng: np.random.Generator, count: int, size: float) -> Floats:
    """Single batches that were hard."""
    found = np.zeros(count)
    places = rng.integers(count // 10, count, size=int(rng.integers(1, 6)))
    found[places] = size * rng.uniform(1.0, 3.0, len(places))
    return found


def _falling(rng: np.random.Generator, times: Floats, *, floor: float) -> Floats:
    """From 1 towards `floor`, still on its way at the end."""
    if rng.random() < 0.5:
        tau, power = float(rng.uniform(0.02, 0.1)), float(rng.uniform(0.3, 0.8))
        fall = (1.0 + times / tau) ** -power
    else:
        fall = np.exp(-times / float(rng.uniform(0.3, 0.6)))
    return np.asarray(floor + (1.0 - floor) * fall)


def _settled(rng: np.random.Generator, times: Floats, *, floor: float, tau: tuple[float, float]) -> Floats:
    return np.asarray(floor + (1.0 - floor) * np.exp(-times / float(rng.uniform(*tau))))


def _loudness(rng: np.random.Generator, count: int, *, most: float) -> float:
    """Sigma; in a short curve only as much as leaves something to see."""
    most = min(most, 0.07 * math.sqrt(count / 100))
    return float(math.exp(rng.uniform(math.log(0.003), math.log(most))))


def _healthy(rng: np.random.Generator, times: Floats, at: Floats) -> _Shape:
    floor = float(rng.uniform(0.0, 0.5))
    training = _falling(rng, times, floor=floor)
    near = np.interp(at, times, training)
    size = 1.0 - float(training[-1])
    return _Shape(
        training,
        near * (1.0 + float(rng.uniform(0.0, 0.06))),
        size * _loudness(rng, len(times), most=0.3),
        size * float(rng.uniform(0.002, 0.02)),
    )


def _plateau(rng: np.random.Generator, times: Floats, at: Floats) -> _Shape:
    floor = float(rng.uniform(0.05, 0.8))
    training = _settled(rng, times, floor=floor, tau=(0.01, 0.12))
    near = np.interp(at, times, training) * (1.0 + float(rng.uniform(0.0, 0.06)))
    size = 1.0 - floor
    loud = _loudness(rng, len(times), most=0.3)
    return _Shape(training, near, size * loud, size * float(rng.uniform(0.002, 0.02)))


def _oscillation(rng: np.random.Generator, times: Floats, at: Floats) -> _Shape:
    floor = float(rng.uniform(0.15, 0.6))
    training = _settled(rng, times, floor=floor, tau=(0.01, 0.2))
    count = len(times)
    period = math.exp(rng.uniform(math.log(2.0), math.log(count / 12)))
    wander = np.cumsum(rng.standard_normal(count)) * 0.15 / math.sqrt(count / period * period)
    phase = 2.0 * math.pi * (np.arange(count) / period + wander)
    form = rng.integers(3)
    wave = np.sin(phase + 1.0)
    if form == 1:
        wave = np.sign(wave)
    elif form == 2:
        wave = 2.0 / math.pi * np.arcsin(wave)
    if period < 3.0:
        wave = np.where(np.arange(count) % 2, 1.0, -1.0)
    reach = floor * float(rng.uniform(0.1, 0.4))
    begun = np.clip((times - float(rng.uniform(0.0, 0.15))) / 0.05, 0.0, 1.0)
    near = np.interp(at, times, training) * (1.0 + float(rng.uniform(0.0, 0.06)))
    return _Shape(training + reach * wave * begun, near, reach * float(rng.uniform(0.02, 0.5)), 0.3 * reach)


def _overfitting(rng: np.random.Generator, times: Floats, at: Floats) -> _Shape:
    floor = float(rng.uniform(0.0, 0.3))
    training = _falling(rng, times, floor=floor)
    turn, power = float(rng.uniform(0.15, 0.6)), float(rng.uniform(0.7, 1.6))
    low = float(np.interp(turn, times, training)) * (1.0 + float(rng.uniform(0.0, 0.3)))
    rise = float(rng.uniform(0.12, 0.8)) * max(low, 1.0 - low) * (1.0 if low > 0.2 else 0.5)
    before = low + (1.0 - low) * np.clip(1.0 - at / turn, 0.0, 1.0) ** float(rng.uniform(1.5, 3.0))
    after = rise * np.clip((at - turn) / (1.0 - turn), 0.0, None) ** power
    size = 1.0 - float(training[-1])
    loud = size * _loudness(rng, len(times), most=0.2)
    return _Shape(training, before + after, loud, rise * float(rng.uniform(0.005, 0.12)))


def _gap(rng: np.random.Generator, times: Floats, at: Floats) -> _Shape:
    floor = float(rng.uniform(0.0, 0.2))
    training = _falling(rng, times, floor=floor)
    end = float(training[-1])
    level = min(0.9, end * float(rng.uniform(1.4, 3.0)) + 0.05)
    validation = np.maximum(_settled(rng, at, floor=level, tau=(0.03, 0.12)), np.interp(at, times, training))
    size = 1.0 - end
    noise = size * _loudness(rng, len(times), most=0.15)
    return _Shape(training, validation, noise, (1.0 - level) * float(rng.uniform(0.002, 0.03)))


_SHAPES = {
    "overfitting": _overfitting,
    "gap": _gap,
    "plateau": _plateau,
    "oscillation": _oscillation,
    "healthy": _healthy,
}
