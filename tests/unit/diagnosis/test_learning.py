"""Whether a run has learned anything: each judgement at its limits."""

import math
from statistics import fmean, pstdev
from typing import Any

import pytest

from steadystep.diagnosis import learning
from steadystep.diagnosis.learning import Progress, base_of, progress
from steadystep.records import BatchStats
from tests.unit.diagnosis.limits import At, at_limits, run
from tests.unit.diagnosis.test_mechanisms import part

SOFT = {"kind": "bce", "target.entropy": math.nan, "target.smallest": 0.0, "target.largest": 1.0, "target.binary": 1.0}
WANDERS = {"kind_of": "['target']", "first.target": part("a", std=1.0, mean=0.0, whole=False, entropy=math.nan)}
NO_RIVALS = {"opposed": (False, True), "measured.rewarded": (False, True)}


def found(start: float, end: float, **more: Any) -> Progress:
    return Progress(**{"start": start, "end": end, "error": 0.0, "end_error": 0.0, "settled": True} | more)


@pytest.mark.parametrize(
    ("of", "yes", "no"),
    [
        (Progress.gained, found(100.0, 97.9), found(100.0, 98.0)),
        (Progress.gained, found(-100.0, -102.1), found(-100.0, -102.0)),
        (Progress.gained, found(100.0, 96.9, error=1.0), found(100.0, 97.0, error=1.0)),
        (Progress.beats_base, found(0.0, 97.9, base=100.0), found(0.0, 98.0, base=100.0)),
        (Progress.beats_base, found(0.0, 96.9, end_error=1.0, base=100.0), found(0.0, 97.0, end_error=1.0, base=100.0)),
        (Progress.beats_base, found(0.0, 96.9, base=100.0), found(0.0, 96.9)),
        (
            Progress.at_base,
            found(100.0, 100.0, base=100.0, end_error=4.0, base_error=5.0),
            found(100.0, 100.0, base=100.0, end_error=4.0, base_error=5.5),
        ),
        (Progress.at_base, found(100.0, 100.0, base=100.0), found(100.0, 100.0)),
        (Progress.at_base, found(100.0, 100.0, base=100.0), found(100.0, 90.0, base=100.0)),
        (Progress.at_base, found(9.0, 1.0, base=1.0), found(9.0, 1.0, base=1.0, settled=False)),
        (Progress.at_base, found(1.0, 1.0, base=1.0, settled=False), found(9.0, 1.0, base=1.0, settled=False)),
        (Progress.stood_still, found(15.0, 15.0, error=1.0), found(15.0, 15.0, error=1.01)),
        (Progress.stood_still, found(-15.0, -15.0, error=1.0), found(-15.0, -15.0, error=1.01)),
        (Progress.stood_still, found(100.0, 98.0), found(100.0, 97.9)),
        (Progress.stood_still, found(100.0, 100.0, base=102.0), found(100.0, 100.0, base=103.0)),
    ],
)
def test_what_is_called_learning(of: property, yes: Progress, no: Progress) -> None:
    assert of.__get__(yes)
    assert not of.__get__(no)


def test_a_run_in_numbers() -> None:
    losses = [3.0 + math.sin(step) - 0.005 * step for step in range(256)]
    made = progress(run(losses=losses))
    assert made is not None
    last = losses[-64:]
    assert made.start == max(fmean(losses[:8]), fmean(losses[:32]))
    assert made.end == fmean(last)
    assert made.end_error == pytest.approx(pstdev(last) / 8.0)
    assert made.error == pytest.approx(math.hypot(pstdev(losses[:32]) / math.sqrt(32.0), made.end_error))
    assert made.base_error == pytest.approx(pstdev(last) / math.sqrt(20.0))
    assert (made.base, made.base_text) == (1.0, "the variance of the targets")


def test_a_short_run_in_numbers() -> None:
    losses = [3.0 - 0.02 * step + 0.1 * (step % 3) for step in range(50)]
    made = progress(run(losses=losses, kind=""))
    assert made is not None
    assert made.start == fmean(losses[:8])
    assert made.end == fmean(losses[-16:])
    assert made.error == pytest.approx(math.hypot(pstdev(losses[:8]) / math.sqrt(8.0), pstdev(losses[-16:]) / 4.0))
    assert (made.base, made.base_text) == (None, "")
    assert progress(run(losses=losses[:49])) is None
    assert progress(run(losses=losses, opposed=True)) is None
    assert progress(run(losses=losses, curve=None)) is None


def test_without_batches_the_base_has_the_error_of_one() -> None:
    losses = [2.0 + 0.1 * (step % 2) for step in range(256)]
    made = progress(run(losses=losses, batch=None, kind=""))
    assert made is not None
    assert made.base_error == pytest.approx(pstdev(losses[-64:]))


@pytest.mark.parametrize(
    ("second", "noise", "start", "error"),
    [
        (3.0, 0.0, 2.75, None),  # three times the first: a mean of all is meant
        (3.1, 0.0, 1.0, 0.0),
        (4.0, 0.3, 3.625, None),  # ten times the noise above it
        (4.1, 0.3, 1.0, 0.3),
    ],
)
def test_the_very_first_loss_counts_where_the_next_ones_exploded(
    second: float, noise: float, start: float, error: float | None
) -> None:
    made = progress(run({"losses": [1.0] + [second] * 7 + [1.0] * 248, "curve.noise": noise}))
    assert made is not None
    assert made.start == start
    assert error is None or made.error == error


@at_limits(
    At(
        learning.is_judged,
        {},
        {"start": (0.0, -0.1), **NO_RIVALS},
        also=(({}, {"kind_of": "['reward']"}), ({}, WANDERS | {"last.target": part("a", std=2.0, whole=False)})),
    ),
    At(
        learning.has_moving_targets,
        WANDERS | {"last.target": part("a", std=2.0, mean=0.0)},
        {
            "last.target": [
                (part("a", std=1.5, mean=0.0), part("a", std=1.49, mean=0.0)),
                (part("a", std=0.66, mean=0.0), part("a", std=0.67, mean=0.0)),
                (part("a", std=1.0, mean=0.76), part("a", std=1.0, mean=0.53)),
                (part("a", std=1.0, mean=-0.76), part("a", std=1.0, mean=-0.53)),
                (part("a", std=1.2, mean=0.76), part("b", std=2.0, mean=0.0)),
                (..., part("a", std=0.0, mean=9.0)),
                (..., None),
            ],
            "first.target": [
                (part("a", whole=False, entropy=math.nan, rows=16), part("a", whole=False, entropy=math.nan, rows=15)),
                (..., part("a", whole=True, entropy=math.nan)),
                (..., part("a", whole=False, entropy=1.0)),
                (..., None),
            ],
            "trail.first": (..., None),
            "trail.last": (..., None),
        },
    ),
    At(
        learning.is_policy,
        {"measured.rewarded": True},
        {"measured.rewarded": (True, False)},
        also=(
            ({"structure.trained": ("actor.0.weight",)}, {"measured.rewarded": False}),
            (
                {"measured.rewarded": False, "structure.trained": ("net.critic.weight", "x")},
                {"measured.rewarded": False, "structure.trained": ("factor.weight",)},
            ),
            ({"measured.rewarded": False, "kind_of": "['return']"}, {"measured.rewarded": False, "kind_of": "['y']"}),
        ),
    ),
    At(
        learning.acts,
        {"last.policy": True, "input.whole": True, "target.whole": False}
        | {"batch.parts": (part("[0]", whole=False), part("[1]"), part("[2]", whole=False))},
        {
            "last.policy": (True, False),
            "batch.parts": [
                (..., (part("[0]"), part("[1]", whole=False), part("[2]", whole=False))),
                (..., (part("[0]", whole=False), part("[1]"), part("[2]"))),
                (..., (part("[0]", whole=False), part("[1]"), part("[2]", whole=False, shape=(3,)))),
            ],
            "trail.last": (..., None),
        },
    ),
    At(
        learning.raw_inputs_of,
        {"inputs.mean": -20.0, "last.input_rms": 2.0},
        {"last.input_rms": [(2.0, 1.99), (math.nan, 1.99)], "inputs.std": (1.0, 20.1)},
    ),
    At(learning.supervised, {}, {"kind": ("mse", ""), **NO_RIVALS}),
    At(
        learning.learns,
        {"end": 0.1},
        {
            "end": (0.5, 0.51),
            "curve": (..., None),
            "opposed": (False, True),
            "target.variance": (0.2, 0.1),
            "curve.best": (0.1, 0.01),
        },
        also=(
            ({"start": 10.0, "end": 0.6}, {"start": 10.0, "end": 0.61}),
            ({"start": 10.0, "end": 5.0, "kind": ""}, {"start": 10.0, "end": 5.1, "kind": ""}),
        ),
    ),
    At(
        learning.stuck,
        {},
        {"updates": (100, 99), "target.variance": (1.02, 1.03), "end": (0.981, 0.979), "opposed": (False, True)},
        also=(
            ({"start": 9.0}, {"start": 9.0, "curve.settled": False}),  # at rest no lower than a constant
            ({"kind": ""}, {"kind": "", "start": 1.1}),  # where it began
        ),
    ),
    At(
        learning.below_constant,
        {"start": 9.0, "end": 2.0},
        {"updates": (100, 99), "end": (0.981, 0.979), "kind": ("mse", ""), "opposed": (False, True)},
    ),
    At(
        learning.worse_than_constant,
        {"end": 2.0},
        {"updates": (100, 99), "end": (1.11, 1.09), "kind": ("mse", ""), "opposed": (False, True)},
        also=(
            # three errors of the last 64
            (
                {"losses": [2.0] * 192 + [4.5, 0.5] * 32},
                {"losses": [2.0] * 192 + [5.5, 0.0] * 32, "target.variance": 2.0},
            ),
        ),
    ),
    At(learning.unlearned, {}, {"end": [(1.0, 0.9), (2.0, 0.9)]}),
    At(
        learning.hardly_learned,
        {"end": 0.9},
        {"end": (0.81, 0.8), "updates": (100, 99), "kind": ("mse", ""), "opposed": (False, True)},
        also=((SOFT | {"target.entropy": 1.0}, SOFT), ({"kind": "", "end": 1.0}, {"kind": "", "end": 0.9})),
    ),
    At(
        learning.nears_floor,
        SOFT | {"start": 1.5, "end": 0.9},
        {"end": (0.99, 1.0), "start": (1.5, 0.9), "target.entropy": (math.nan, 1.0), "opposed": (False, True)},
        also=(({"target.binary": 1.5}, {"target.binary": 0.01}),),
    ),
    At(
        learning.has_floor,
        SOFT,
        {"kind": [("bce with logits", "mse"), ("bce", "")], "target.entropy": (math.nan, 0.5)},
    ),
    At(
        learning.has_learned,
        {"end": 0.9},
        {"end": (0.979, 0.981), "opposed": (False, True)},
        also=(
            ({"kind": "", "end": 0.4}, {"kind": "", "end": 0.6}),
            ({"start": 2.0}, {"start": 0.9}),  # below a constant from the start
        ),
    ),
)
def test_it_holds_at_its_limit_and_not_beyond(row: At) -> None:
    row.check()


def test_rewards_are_found_by_their_name_or_beside_actions() -> None:
    signal = part("[2]", whole=False)
    batch = {"batch.parts": (part("[0]", whole=False), part("[1]"), signal, part("[3]", whole=False, shape=(2,)))}
    assert learning.reward(run(batch)) is None
    assert learning.reward(run(batch | {"last.policy": True})) is signal
    named = part("['Advantages']")
    assert learning.reward(run({"batch.parts": (named, signal), "last.policy": True})) is named
    assert learning.reward(run(batch=None)) is None


def test_the_target_is_what_the_loss_is_of_or_is_called_so_or_comes_last() -> None:
    named, last = part("['Labels']"), part("[2]")
    parts = {"batch.parts": (part("[0]"), named, last)}
    assert learning.target(run(parts, kind="")) is named
    assert learning.target(run(parts, kind_of="[2]")) is last
    assert learning.target(run(parts, kind_of="[7]")) is None
    unnamed = run({"batch.parts": (part("[0]"), last)}, kind="")
    assert learning.target(unnamed) is last
    assert learning.target(run({"batch.parts": (last,)}, kind="")) is None
    heard = run(parts, kind_of="['target']")
    assert heard.measured.outputs.last is not None
    assert learning.target(heard) is heard.measured.outputs.last.target is not None
    assert learning.target(run(parts | {"trail.last": None}, kind_of="['target']")) is None


def test_looks_at_targets_are_counted_where_they_were_made() -> None:
    assert learning.num_looks(run()) == 20  # in the batch
    assert learning.num_looks(run(batch=BatchStats(batches=20, parts=()), kind_of="['target']")) == 8  # in the loss
    assert learning.num_looks(run(batch=None, kind="")) == 0


def test_a_loss_that_is_a_multiple_has_a_base_that_is() -> None:
    multiple = {"trail.matches": {}, "trail.pairs": [(3.0, 1.0)] * 3, "outputs.kind": "mse"}
    assert learning.base_level(run(multiple)) == (3.0, "the variance of the targets")
    assert learning.base_level(run()) == (1.0, "the variance of the targets")
    assert learning.base_level(run(kind="")) == learning.base_level(run(kind="l1", **{"target.deviation": 0.0}))


NONE = {"entropy": math.nan, "variance": 0.0, "binary": math.nan, "rows": 16}


@pytest.mark.parametrize(
    ("kind", "fields", "base"),
    [
        ("cross-entropy", {"entropy": 0.021}, 0.021),
        ("cross-entropy", {"entropy": 0.02}, None),
        ("nll", {"entropy": 1.0}, 1.0),
        ("nll from probabilities", {"entropy": 1.0}, 1.0),
        ("mse", {"entropy": 1.0}, None),
        ("cross-entropy", {"marginal": 0.021}, 0.021),
        ("cross-entropy", {"marginal": 0.02}, None),
        ("nll", {"marginal": 1.0}, None),
        ("kl", {"marginal": 1.0, "conditional": 0.75}, 0.25),
        ("kl", {"marginal": 0.25, "conditional": 0.235}, None),
        ("kl", {"marginal": 0.02, "conditional": 0.0}, None),
        ("bce", {"binary": 0.021, "smallest": 0.0, "largest": 1.0}, 0.021),
        ("bce with logits", {"binary": 0.5, "smallest": 0.0, "largest": 1.0}, 0.5),
        ("bce", {"binary": 0.02, "smallest": 0.0, "largest": 1.0}, None),
        ("bce", {"binary": 0.5, "smallest": -0.1, "largest": 1.0}, None),
        ("bce", {"binary": 0.5, "smallest": 0.0, "largest": 1.1}, None),
        ("bce", {"binary": 0.5, "smallest": 0.5, "largest": 0.5}, None),
        ("kl", {"binary": 0.5, "smallest": 0.0, "largest": 1.0}, None),
        ("mse", {"variance": 0.5}, 0.5),
        ("mse", {"variance": 0.0}, None),
        ("l1", {"variance": 0.5}, None),
        ("sum of squares", {"variance": 0.5, "rows": 4, "shape": (3, 5)}, 30.0),
        ("sum of squares", {"variance": 0.0}, None),
        ("l1", {"deviation": 0.5}, 0.5),
        ("l1", {"deviation": 0.5, "rows": 15}, None),
        ("l1", {"deviation": 0.0}, None),
        ("huber", {"deviation": 0.5}, None),
        ("huber", {"huber": 0.5}, 0.5),
        ("huber", {"huber": 0.5, "rows": 15}, None),
        ("huber", {"huber": 0.0}, None),
        ("l1", {"huber": 0.5}, None),
    ],
)
def test_what_the_best_constant_prediction_costs(kind: str, fields: dict[str, Any], base: float | None) -> None:
    found, text = base_of(kind, part(**NONE | fields))
    assert found == base
    assert bool(text) is (base is not None)
