"""Signs that count by a mechanism, each beside the same run without it: what is wrong is named, what works is not."""

import math
from typing import Any

import pytest

from steadystep.diagnosis.facts import Facts
from steadystep.diagnosis.learning import has_moving_targets, is_judged
from steadystep.diagnosis.measured import Measured
from steadystep.diagnosis.ranking import rank
from steadystep.records import BatchStats, DetectorName, InputStats, Probe, WeightStats
from tests.unit.diagnosis.made import facts, finding, tallies, tally
from tests.unit.diagnosis.test_mechanisms import FALLS, FLAT, first, outputs, part, run

SLOW = [1.4 - 0.3 * step / 256 for step in range(256)]  # to four fifths of the entropy of four labels
NUMBERS = part("[1]", whole=False, entropy=math.nan, mean=0.0, std=1.0, smallest=-2.0, largest=2.0, variance=1.4)


def named(made: Facts) -> set[str]:
    return {found.fault or found.cause for found in rank(made)}


def of_numbers(losses: list[float], **more: Any) -> Facts:
    """A regression, with targets of a variance of 1.4."""
    target = more.pop("target", NUMBERS)
    seen = outputs(kind="mse", shape=(32, 1), target=target, **more)
    return run(losses, seen=seen, parts=(part("[0]", whole=False), target))


def test_scores_from_a_relu_are_a_fault_where_little_is_learned() -> None:
    assert first(run(SLOW, seen=outputs(activation="relu"))) == "wrong-loss"
    assert first(run(FALLS, seen=outputs(activation="relu"))) == "healthy"
    assert first(run(SLOW)) == "healthy"


def test_outputs_that_end_in_a_relu_do_not_reach_below_zero() -> None:
    assert first(of_numbers(FLAT, activation="relu", smallest=0.0)) == "wrong-loss"
    above = part("[1]", whole=False, entropy=math.nan, mean=3.0, std=1.0, smallest=0.5, largest=6.0, variance=1.4)
    assert first(of_numbers(FLAT, activation="relu", smallest=0.0, largest=5.0, target=above)) != "wrong-loss"


def _overlap(losses: list[float], *, smallest: float = -4.0, largest: float = 1.0, wanted: float = 1.0) -> Facts:
    mask = part("[1]", whole=False, smallest=0.0, largest=wanted, binary=0.3, values=2, shape=(1, 8, 8))
    seen = outputs(kind="", terms=0, target=None, shape=(32, 1, 8, 8), smallest=smallest, largest=largest)
    measured = Measured()
    measured.batch = BatchStats(batches=20, parts=(part("[0]", whole=False, shape=(1, 8, 8)), mask))
    for _ in range(8):
        measured.outputs.add(seen, 0.5)
    return facts(losses, measured=measured)


def test_a_loss_of_zeros_and_ones_is_never_negative() -> None:
    falls = [0.7 - step / 256 for step in range(256)]
    assert first(_overlap(falls)) == "wrong-loss"
    assert first(_overlap([0.7 - 0.5 * step / 256 for step in range(256)])) == "healthy"
    assert "wrong-loss" not in named(_overlap(falls, smallest=0.0, largest=1.0))  # they are shares
    assert "wrong-loss" not in named(_overlap(falls, wanted=2.0))  # no mask


def test_balanced_class_numbers_are_no_quantities() -> None:
    labels = part("[1]", mean=4.5, std=2.9, smallest=0.0, largest=9.0, variance=2.0, values=10, entropy=2.3)
    assert first(of_numbers(SLOW, target=labels, largest=8.0)) == "wrong-loss"
    scores = part("[1]", mean=5.5, std=1.0, smallest=1.0, largest=10.0, variance=2.0, values=10, entropy=1.6)
    assert first(of_numbers(SLOW, target=scores, largest=8.0)) != "wrong-loss"  # marks from 1 to 10
    assert first(of_numbers(FALLS, target=labels)) == "healthy"


def _penalized(number: int, value: float) -> Facts:
    measured = Measured()
    for probe in range(8):
        term = ("cross-entropy of ['target']", value * (1.0 + 0.01 * probe))
        measured.outputs.add(outputs(penalized=number, losses=(term,)), 5.0)
    return facts([20.0 - 15.0 * step / 256 for step in range(256)], measured=measured)


def test_a_penalty_that_is_most_of_the_loss() -> None:
    assert first(_penalized(4, 0.9)) == "regularisation-too-strong"
    assert first(_penalized(0, 0.9)) == "healthy"  # something else than a penalty on weights
    assert first(_penalized(4, 0.2)) == "healthy"  # what it is about was learned
    assert first(_penalized(4, 2.0)) == "healthy"  # it is not most of the loss


def test_a_sigmoid_that_is_steep_has_a_gradient() -> None:
    yes_no = part("[1]", whole=False, smallest=0.0, largest=1.0, variance=1.4, entropy=0.69)
    flat = of_numbers(FLAT, activation="sigmoid", target=yes_no, smallest=0.01, largest=0.99)
    assert "wrong-loss" in named(flat)
    steep = of_numbers(FLAT, activation="sigmoid", target=yes_no, smallest=0.4, largest=0.55)
    assert "wrong-loss" not in named(steep)


def test_logits_between_zero_and_one_are_no_probabilities_where_the_call_was_seen() -> None:
    yes_no = part("['target']", whole=False, smallest=0.0, largest=1.0, binary=0.69, entropy=0.69)
    seen = outputs(kind="bce with logits", smallest=0.3, largest=0.7, target=yes_no)
    assert "wrong-loss" not in named(run(seen=seen, parts=(part("[0]", whole=False), yes_no)))


@pytest.mark.parametrize("detector", [DetectorName.WEIGHT_JUMP, DetectorName.VANISHING_GRADIENT])
def test_a_single_warning_in_a_run_that_learns_is_no_cause(detector: str) -> None:
    assert first(run(FALLS, warned=tallies(detector))) == "healthy"
    assert first(run(FLAT, warned=tallies(detector))) != "healthy"


def test_inputs_that_made_the_first_updates_diverge_stay_the_cause() -> None:
    raw = InputStats(batches=4, mean=77.0, std=96.0, largest=255.0, constant_share=0.0, scale_spread=1.0, finite=True)
    found = {DetectorName.EARLY_DIVERGENCE: tally(finding(DetectorName.EARLY_DIVERGENCE, "act"))}
    incident = {"learning-rate-too-high": tally(finding(DetectorName.EARLY_DIVERGENCE, "act"))}
    assert first(run(FALLS, inputs=raw, warned=found, incidents=incident)) == "unscaled-data"
    assert first(run(FALLS, warned=found, incidents=incident)) == "learning-rate-too-high"
    assert first(run(FALLS, inputs=raw)) == "healthy"


def _first_updates(*updates: float) -> Probe:
    names = tuple(f"{number}.weight" for number in range(len(updates)))
    return Probe(step=1, names=names, weight_rms=(1.0,) * len(updates), update_rms=updates)


def test_updates_that_fade_from_the_last_layer_to_the_first() -> None:
    fading = _first_updates(1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-2)
    assert "vanishing-gradient" in named(run(FLAT, first_probe=fading))
    assert "vanishing-gradient" not in named(run(FALLS, first_probe=fading))
    assert "vanishing-gradient" not in named(run(FLAT, first_probe=_first_updates(*(1e-3,) * 6)))
    assert "vanishing-gradient" not in named(run(FLAT, first_probe=_first_updates(1e-6, 1e-2, 1e-2)))
    # an optimizer that divides by the size of the gradient does not show it
    assert "vanishing-gradient" not in named(run(FLAT, first_probe=fading, structure={"scale_free": True}))


def test_factors_that_are_all_alike() -> None:
    alike = WeightStats(names=("0.weight", "2.weight"), rms=(0.1, 0.1), std=(0.0, 0.0))
    assert first(run(SLOW, initial=alike)) == "poor-initialisation"
    gains = WeightStats(names=("0.weight", "2.weight"), rms=(1.0, 1.0), std=(0.0, 0.0))
    assert first(run(SLOW, initial=gains)) == "healthy"


def _wanders(start: float, end: float) -> Facts:
    made = of_numbers(FLAT)
    trail = made.measured.outputs
    for name, mean in (("first", start), ("last", end)):
        target = part("['target']", whole=False, entropy=math.nan, mean=mean, std=1.0, variance=1.4)
        setattr(trail, name, outputs(kind="mse", shape=(32, 1), target=target))
    return made


def test_the_level_of_a_loss_says_nothing_while_its_targets_wander() -> None:
    assert has_moving_targets(_wanders(0.0, 1.0))
    assert not is_judged(_wanders(0.0, 1.0))
    assert not has_moving_targets(_wanders(0.0, 0.3))
    assert first(_wanders(0.0, 1.0)) == "healthy"
    assert first(_wanders(0.0, 0.0)) != "healthy"
