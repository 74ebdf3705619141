"""What is said about fixed curves, and when: a changed limit or rule shows here first."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from steadystep.detectors import GradientSpike, SlowDivergence
from steadystep.detectors.oscillation import Oscillation
from steadystep.records import Finding, Signals
from tests.unit.detectors.feeding import fed, row, rows


def waves(count: int, size: float, *, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [rng.gauss(0.0, size) for _ in range(count)]


def learned(
    steps: int, size: float = 0.05, *, then: Callable[[int], float], more: int = 200, seed: int = 0
) -> list[float]:
    """From four down to two with noise, and then something else."""
    fall = [2.0 + 2.0 * math.exp(-i / 40) for i in range(steps)]
    after = [2.0 + then(i) for i in range(more)]
    return [level + n for level, n in zip([*fall, *after], waves(steps + more, size, seed=seed), strict=True)]


def tailed(count: int) -> list[float]:
    rng = random.Random(3)
    return [1.0 + math.exp(-i / 30) + 0.02 * rng.random() + (0.8 if rng.random() < 0.15 else 0.0) for i in range(count)]


SLOW: dict[str, tuple[list[float], dict[str, Any]]] = {
    "creeps": (learned(300, then=lambda i: 0.001 * i), {}),
    "creeps faster": (learned(300, then=lambda i: 0.005 * i, seed=1), {}),
    "creeps in a long run": (learned(900, then=lambda i: 0.002 * i, more=300, seed=2), {}),
    "jumps by five sigma": (learned(300, then=lambda i: 0.25, seed=3), {}),
    "jumps by seven sigma": (learned(300, then=lambda i: 0.35, seed=4), {}),
    "jumps by a quarter of what was learned": (learned(300, then=lambda i: 0.55, seed=5), {}),
    "jumps and comes down": (learned(300, then=lambda i: 0.6 * math.exp(-i / 12), seed=6), {}),
    "jumps after a short run": (learned(150, then=lambda i: 0.3, seed=7), {}),
    "jumps after a shorter run": (learned(112, then=lambda i: 0.3, seed=8), {}),
    "a rough loss": (learned(400, 0.8, then=lambda i: 2.5, more=400, seed=9), {}),
    "a loss with few large samples": ([*tailed(320), *(loss + 0.35 for loss in tailed(200))], {}),
    "a level that wanders": (
        [x + 0.12 * math.sin(i / 25) for i, x in enumerate(learned(600, then=lambda i: 0.004 * i, more=250, seed=10))],
        {},
    ),
    "a rise too small": (learned(300, 0.001, then=lambda i: 0.035), {}),
    "a rise of two percent": (learned(300, 0.001, then=lambda i: 0.045), {}),
    "losses that are rounded": (
        [round(64 * x) / 64 for x in learned(300, 0.002, then=lambda i: 0.08)],
        {"loss_eps": 2.0**-8},
    ),
    "after a negative loss": (
        [*learned(64, then=lambda i: 0.0, more=0), -1.0, *learned(300, then=lambda i: 0.4, seed=11)],
        {},
    ),
    "under a rate that climbs": (
        learned(300, then=lambda i: 0.001 * i, seed=12),
        {"lr": [0.1] * 300 + [0.1 * 1.03**i for i in range(200)]},
    ),
    "under a rate that comes back": (
        learned(300, then=lambda i: 0.3, seed=13),
        {"lr": [1.0] * 100 + [0.1] * 200 + [1.0] * 200},
    ),
    "beyond what can be added up": ([1e308] * 64 + learned(300, then=lambda i: 0.5, seed=14), {}),
    "with losses that are not finite": (
        [x if i % 7 else math.nan for i, x in enumerate(learned(300, then=lambda i: 0.3, seed=15))],
        {},
    ),
    "square waves": (
        [4.0] * 16 + [2.0 + 0.1 * (-1) ** i for i in range(240)] + [2.5 + 0.1 * (-1) ** i for i in range(90)],
        {},
    ),
}


def cycle(
    period: int, size: Callable[[int], float], *, level: Callable[[int], float], noise: float = 0.01
) -> list[float]:
    return [
        level(i) + size(i) * math.cos(2 * math.pi * i / period) + n
        for i, n in enumerate(waves(256, noise, seed=period))
    ]


SWINGS: dict[str, list[float]] = {
    "every two steps": cycle(2, lambda i: 0.3, level=lambda i: 2.0),
    "every six steps": cycle(6, lambda i: 0.3, level=lambda i: 2.0),
    "every eight steps": cycle(8, lambda i: 0.3, level=lambda i: 2.0),
    "every ten steps": cycle(10, lambda i: 0.3, level=lambda i: 2.0),
    "half a cycle and half noise": cycle(2, lambda i: 0.3, level=lambda i: 2.0, noise=0.2),
    "a cycle with more noise": cycle(4, lambda i: 0.3, level=lambda i: 2.0, noise=0.12),
    "just above what matters": cycle(2, lambda i: 0.104, level=lambda i: 2.0, noise=0.0),
    "just below what matters": cycle(2, lambda i: 0.099, level=lambda i: 2.0, noise=0.0),
    "small against the way it came": [10.0] * 4 + cycle(2, lambda i: 0.3, level=lambda i: 1.0, noise=0.0)[4:],
    "grows from the bottom": cycle(2, lambda i: 0.1 * 1.02**i, level=lambda i: 1.0 + 0.1 * 1.02**i),
    "grows by less than twofold": cycle(2, lambda i: 0.2 * 1.012**i, level=lambda i: 1.0 + 0.2 * 1.012**i),
    "grows both ways": cycle(2, lambda i: 0.2 * 1.02 ** (i % 64), level=lambda i: 2.0),
    "falls slowly": cycle(2, lambda i: 0.3, level=lambda i: 3.0 - 0.0015 * i),
    "falls": cycle(2, lambda i: 0.3, level=lambda i: 3.0 - 0.004 * i),
    "around nothing": cycle(4, lambda i: 0.3, level=lambda i: 0.0),
    "wild and no lower": [*[1.0 + n for n in waves(128, 0.02)], *[3.0 + n for n in waves(192, 1.0, seed=1)]],
    "wild and lower": [*[3.0 + n for n in waves(128, 0.1)], *[2.0 + n for n in waves(192, 0.8, seed=1)]],
    "wild from the start": [*[1.0] * 4, *[6.0 + n for n in waves(252, 2.0, seed=2)]],
    "less than three times as wild": [*[3.0 + n for n in waves(128, 0.5)], *[3.2 + n for n in waves(192, 1.2, seed=1)]],
    "beyond all squares": [1e200, -1e200] * 64,
    "nothing moves": [2.0] * 200,
    "not finite in between": [x for i in range(100) for x in (2.0 + 0.3 * (-1) ** i, math.nan)],
}


def norms(*parts: tuple[float, int], spread: float = 0.1, seed: int = 0, **fields: Any) -> list[Signals]:
    """Norms of four tensors around levels; the loss is flat and noisy."""
    rng = random.Random(seed)
    stream: list[Signals] = []
    for level, count in parts:
        for _ in range(count):
            size = level * math.exp(rng.gauss(0.0, spread))
            tensors = tuple(size * share for share in (0.5, 0.5, 0.5, 0.5))
            given = {"loss": 2.0 + rng.gauss(0.0, 0.05)} | fields
            stream.append(row(len(stream), grad_norm=size, norms=tensors, names=("a", "b", "c", "d"), **given))
    return stream


def changed(stream: list[Signals], at: int, count: int = 1, **fields: Any) -> list[Signals]:
    return [replace(s, **fields) if at <= s.step < at + count else s for s in stream]


def one_tensor(stream: list[Signals], at: int, times: float) -> list[Signals]:
    """The first tensor alone is so many times as large."""
    first, *rest = stream[at].norms
    sizes = (times * first, *rest)
    return changed(stream, at, norms=sizes, grad_norm=math.hypot(*sizes))


GRADIENTS: dict[str, list[Signals]] = {
    "six times": norms((1.0, 200), (6.2, 1), (1.0, 20), seed=1),
    "eight times": norms((1.0, 200), (8.0, 1), (1.0, 20), seed=2),
    "eight times and young": norms((1.0, 100), (8.0, 1), (1.0, 20), seed=3),
    "twenty times and young": norms((1.0, 60), (20.0, 1), (1.0, 20), seed=4),
    "eight times with a high loss": changed(norms((1.0, 200), (8.0, 1), (1.0, 9), seed=5), 200, loss=3.0),
    "fifty times with a high loss": changed(norms((1.0, 200), (50.0, 1), (1.0, 9), seed=6), 200, loss=3.0),
    "two hundred times with a high loss": changed(norms((1.0, 200), (200.0, 1), (1.0, 9), seed=6), 200, loss=3.0),
    "one tensor by thirty": one_tensor(norms((1.0, 220), seed=7), 210, 30.0),
    "one tensor by three hundred": one_tensor(norms((1.0, 220), seed=8), 210, 300.0),
    "an update as large as others": [
        *changed(norms((1.0, 220), seed=9), 30, lr=50.0)[:210],
        row(210, grad_norm=20.0, norms=(20.0, 0.1, 0.1, 0.1), names=("a", "b", "c", "d")),
    ],
    "one norm alone": [
        row(i, grad_norm=s.grad_norm, norms=(s.grad_norm,), names=("a",))
        for i, s in enumerate(norms((1.0, 200), (9.5, 1), (1.0, 20), (12.0, 1), (1.0, 20), (300.0, 1), spread=0.02))
    ],
    "a wide run": norms((1.0, 300), (20.0, 1), (1.0, 5), (3000.0, 1), (1.0, 5), spread=0.5, seed=10),
    "a new level": norms((1.0, 200), (20.0, 150), seed=11),
    "a new level that hurts": [
        *norms((1.0, 200), seed=12),
        *(
            row(200 + i, grad_norm=20.0, norms=(10.0,) * 4, names=("a", "b", "c", "d"), loss=2.0 + 0.01 * i)
            for i in range(80)
        ),
    ],
    "a new level that is over": norms((1.0, 200), (20.0, 30), (1.0, 30), (20.0, 30), seed=13),
    "outliers that disagree": norms((1.0, 200), *[(20.0 * 5.0 ** (i % 2), 1) for i in range(30)], seed=14),
    "a burst": norms((1.0, 200), (4.0, 4), (12.0, 3), (1.0, 20), seed=15),
    "spikes all the time": norms(*[(1.0, 19), (9.0, 1)] * 20, seed=16),
    "not a number": changed(norms((1.0, 200), (30.0, 1), seed=17), 150, 20, grad_norm=math.nan),
}


Said = tuple[str, list[tuple[int, str]], str]


def summary(found: list[Finding]) -> Said:
    """How many notes, from where to where; what is more than a note; and the sums of values, limits and beginnings."""
    notes = [f.step for f in found if f.severity == "info"]
    loud = [(f.step, f.severity) for f in found if f.severity != "info"]
    sums = [sum(f.value for f in found), sum(f.limit for f in found), sum(f.since or 0 for f in found)]
    sums.append(sum(f.baseline or 0.0 for f in found))
    span = f"{len(notes)} from {notes[0]} to {notes[-1]}" if notes else "none"
    shown = loud if len(loud) <= 4 else [loud[0], (len(loud), "in all"), loud[-1]]
    return span, shown, " ".join(f"{total:.5g}" for total in sums)


SAID_SLOW: dict[str, Said] = {
    "creeps": ("20 from 336 to 494", [(414, "warn")], "44.284 42.82 6678 41.98"),
    "creeps faster": ("21 from 325 to 499", [(363, "warn"), (395, "act")], "57.967 47.322 7061 46.394"),
    "creeps in a long run": ("33 from 929 to 1199", [(951, "warn"), (1095, "act")], "81.008 70.767 31045 69.38"),
    "jumps by five sigma": ("24 from 309 to 499", [(355, "warn")], "56.16 51.134 7475 50.132"),
    "jumps by seven sigma": ("24 from 309 to 497", [(313, "warn")], "58.632 51.103 7425 50.101"),
    "jumps by a quarter of what was learned": ("24 from 309 to 499", [(315, "act")], "63.585 51.012 7475 50.012"),
    "jumps and comes down": ("3 from 308 to 326", [(310, "warn")], "8.9651 8.1605 1148 8.0004"),
    "jumps after a short run": ("23 from 160 to 342", [(206, "warn")], "55.244 52.361 3576 51.334"),
    "jumps after a shorter run": ("13 from 145 to 306", [], "29.93 29.779 1664 29.195"),
    "a rough loss": ("none", [], "0 0 0 0"),
    "a loss with few large samples": ("32 from 160 to 517", [], "46.859 35.275 6784 32.447"),
    "a level that wanders": ("58 from 177 to 846", [(217, "warn"), (822, "act")], "137.2 117.54 9600 115.23"),
    "a rise too small": ("none", [], "0 0 0 0"),
    "a rise of two percent": ("23 from 317 to 493", [], "47.035 47.007 6877 46.086"),
    "losses that are rounded": ("24 from 311 to 495", [], "49.862 48.976 7176 48.016"),
    "after a negative loss": ("24 from 74 to 561", [], "58.464 52.286 8873 51.261"),
    "under a rate that climbs": ("17 from 364 to 492", [(356, "warn")], "38.067 36.759 5886 36.039"),
    "under a rate that comes back": ("none", [], "0 0 0 0"),
    "beyond what can be added up": ("24 from 373 to 561", [(377, "act")], "62.387 51.12 9025 50.118"),
    "with losses that are not finite": ("20 from 311 to 498", [(320, "warn")], "48.192 42.732 6601 41.894"),
    "square waves": ("11 from 259 to 343", [(311, "act")], "29.5 24.985 3060 24"),
}
SAID_SWINGS: dict[str, Said] = {
    "every two steps": ("2 from 63 to 191", [], "0.59942 0.19983 0 0"),
    "every six steps": ("2 from 63 to 191", [], "0.42443 0.19978 0 0"),
    "every eight steps": ("2 from 63 to 191", [], "0.42627 0.20008 0 0"),
    "every ten steps": ("none", [], "0 0 0 0"),
    "half a cycle and half noise": ("2 from 63 to 191", [], "0.71692 0.19655 0 0"),
    "a cycle with more noise": ("2 from 63 to 191", [], "0.48107 0.20039 0 0"),
    "just above what matters": ("2 from 63 to 191", [], "0.20792 0.2 0 0"),
    "just below what matters": ("none", [], "0 0 0 0"),
    "small against the way it came": ("none", [], "0 0 0 0"),
    "grows from the bottom": ("none", [(63, "warn"), (191, "warn")], "8.5943 6.6665 0 0"),
    "grows by less than twofold": ("2 from 63 to 191", [], "1.7093 0.18292 0 0"),
    "grows both ways": ("2 from 63 to 191", [], "0.84545 0.19943 0 0"),
    "falls slowly": ("2 from 63 to 191", [], "0.59942 0.2855 0 0"),
    "falls": ("none", [], "0 0 0 0"),
    "around nothing": ("2 from 63 to 191", [], "0.42477 8.6911e-05 0 0"),
    "wild and no lower": ("1 from 191 to 191", [], "0.88653 0.057157 0 0"),
    "wild and lower": ("none", [], "0 0 0 0"),
    "wild from the start": ("2 from 63 to 191", [], "11.034 3 0 0"),
    "less than three times as wild": ("none", [], "0 0 0 0"),
    "beyond all squares": ("none", [], "0 0 0 0"),
    "nothing moves": ("none", [], "0 0 0 0"),
    "not finite in between": ("1 from 126 to 126", [], "0.29989 0.1 0 0"),
}
SAID_GRADIENTS: dict[str, Said] = {
    "six times": ("none", [(200, "act")], "7.4701 6.1219 0 1.0203"),
    "eight times": ("none", [(200, "act")], "7.4584 6.0421 0 1.007"),
    "eight times and young": ("none", [], "0 0 0 0"),
    "twenty times and young": ("none", [(60, "act")], "20.105 18.927 0 1.0068"),
    "eight times with a high loss": ("none", [], "0 0 0 0"),
    "fifty times with a high loss": ("none", [], "0 0 0 0"),
    "two hundred times with a high loss": ("none", [(200, "act")], "229.58 168.9 0 1.0299"),
    "one tensor by thirty": ("none", [], "0 0 0 0"),
    "one tensor by three hundred": ("none", [(210, "act")], "140.99 48.415 0 1.0027"),
    "an update as large as others": ("none", [], "0 0 0 0"),
    "one norm alone": ("none", [], "0 0 0 0"),
    "a wide run": ("none", [(306, "act")], "2178.9 110.75 0 0.99727"),
    "a new level": ("none", [(200, "act"), (5, "in all"), (204, "act")], "102.37 29.631 0 4.9385"),
    "a new level that hurts": ("none", [(200, "act"), (10, "in all"), (209, "act")], "200 60.41 0 10.068"),
    "a new level that is over": ("none", [(200, "act"), (60, "in all"), (289, "act")], "1176.1 880.15 0 82.715"),
    "outliers that disagree": ("none", [(200, "act"), (29, "in all"), (229, "act")], "1750.6 267.69 0 29.051"),
    "a burst": ("none", [], "0 0 0 0"),
    "spikes all the time": ("none", [], "0 0 0 0"),
    "not a number": ("none", [], "0 0 0 0"),
}


@pytest.mark.parametrize("name", SLOW)
def test_losses_that_creep(name: str) -> None:
    losses, fields = SLOW[name]
    assert summary(fed(SlowDivergence, rows(loss=losses, **fields))) == SAID_SLOW[name]


def test_a_level_that_was_just_forgotten_is_no_measure() -> None:
    """A negative loss in the block that ends while the sum is high."""
    losses = learned(144, then=lambda i: 3.0, more=32, seed=16)
    losses[151] = -1.0
    found = fed(SlowDivergence, rows(loss=losses))
    assert [f.step for f in found if f.step >= 159] == []
    assert not any(math.isnan(f.limit) or f.baseline != f.baseline for f in found)


@pytest.mark.parametrize("name", SWINGS)
def test_losses_that_swing(name: str) -> None:
    assert summary(fed(lambda: Oscillation(quiet_steps=128), rows(loss=SWINGS[name]))) == SAID_SWINGS[name]


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_that_stand_out(name: str) -> None:
    assert summary(fed(GradientSpike, GRADIENTS[name])) == SAID_GRADIENTS[name]
