"""Gradients that are without zero_grad in the middle of a run."""

import json
import math
import random
from collections.abc import Callable

import pytest

from steadystep.detectors import GrowingGradient
from steadystep.records import Finding, Signals

BEGIN, LAST = 200, 260
DIMENSIONS = 40


def gradient(rng: random.Random) -> list[float]:
    """Of one batch: half of it the same in all, its size as different as batches are."""
    size = math.exp(rng.gauss(0.0, 0.25))
    return [size * (rng.gauss(0.0, 1.0) + 0.5) for _ in range(DIMENSIONS)]


def norms(*, kept: range, seed: int = 0) -> list[float]:
    """The norm of each step's gradient, to which the one before is added in `kept`."""
    rng = random.Random(seed)
    found, former = [], [0.0] * DIMENSIONS
    for step in range(LAST):
        former = [f * (step in kept) + g for f, g in zip(former, gradient(rng), strict=True)]
        found.append(math.hypot(*former))
    return found


def said(sizes: list[float], loss: Callable[[int], float] = lambda step: 1.0, *, cut: int = LAST) -> list[Finding]:
    rng = random.Random(1)
    detector, found = GrowingGradient(), []
    for step, norm in enumerate(sizes):
        if step == cut:
            saved = json.loads(json.dumps(detector.state_dict()))
            detector = GrowingGradient()
            detector.load_state_dict(saved)
        found += detector.update(Signals(step=step, loss=loss(step) + rng.gauss(0.0, 0.1), grad_norm=norm))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_a_sum_is_told_once_while_it_lasts(seed: int) -> None:
    (found,) = said(norms(kept=range(BEGIN, BEGIN + 20), seed=seed))
    assert found.severity == "warn"
    assert BEGIN + 8 <= found.step < BEGIN + 20
    assert found.since is not None
    assert BEGIN - 1 <= found.since <= BEGIN + 6
    assert found.baseline is not None
    assert found.value > found.limit == pytest.approx(3.0 * found.baseline)
    assert "without zero_grad" in found.what


def test_a_likelihood_that_becomes_sharper_is_no_sum() -> None:
    """Its gradient grows with its precision, and its loss is negative by then."""
    assert said(norms(kept=range(BEGIN, BEGIN + 20)), lambda step: 1.0 if step < BEGIN else -1.0) == []


def test_it_goes_on_after_a_resume() -> None:
    sizes = norms(kept=range(BEGIN, BEGIN + 20))
    assert said(sizes, cut=BEGIN + 6) == said(sizes)


def test_a_state_from_before_it_existed_is_read() -> None:
    detector = GrowingGradient()
    detector.load_state_dict({"norms": [], "done": True})
    assert detector.state_dict()["piling"]["stretch"] == []


def test_what_is_no_sum() -> None:
    baseline = norms(kept=range(0))
    assert said(baseline) == []
    later = range(BEGIN, LAST)
    climb = [min(1.0 + 0.5 * max(0, step - BEGIN), 5.0) for step in range(LAST)]
    ways = {
        "another level": [norm * (5.0 if step in later else 1.0) for step, norm in enumerate(baseline)],
        "a level that is reached in steps, as noisy as before": [n * c for n, c in zip(baseline, climb, strict=True)],
        "a smooth run": [1.0 + c for c in climb],
        "one that climbs all the time": [1.01**step * n for step, n in enumerate(norms(kept=range(0)))],
        "a few steps": norms(kept=range(BEGIN, BEGIN + 5)),
        "a sum that is broken off by NaN": [
            math.nan if step > BEGIN and step % 8 == 0 else norm for step, norm in enumerate(norms(kept=later))
        ],
    }
    assert [name for name, sizes in ways.items() if said(sizes)] == []


def test_a_loss_that_rises_with_it_has_gradients_of_its_own() -> None:
    sizes = norms(kept=range(BEGIN, BEGIN + 20))
    assert said(sizes, lambda step: 2.0 if BEGIN <= step < BEGIN + 20 else 1.0) == []


def test_a_lasting_level_becomes_the_usual_one() -> None:
    sizes = [norm * (5.0 if step > 60 else 1.0) for step, norm in enumerate(norms(kept=range(0), seed=3))]
    later = norms(kept=range(BEGIN, BEGIN + 20), seed=4)
    (found,) = said([*sizes, *(5.0 * norm for norm in later)])
    assert LAST + BEGIN < found.step < LAST + BEGIN + 20
