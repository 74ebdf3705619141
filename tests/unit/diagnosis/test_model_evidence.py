"""Signs in the model and its optimizer, each at its limits."""

from collections.abc import Sequence
from typing import Any

import pytest

from steadystep.diagnosis import model_evidence as signs
from tests.unit.diagnosis.limits import At, at_limits, run
from tests.unit.diagnosis.made import tallies

LEARNED = (1.0, 0.1)  # the loss of the second half: at a constant's, and far below
SOMEWHAT = (0.7, 0.1)  # neither stuck nor halved, and far below
ROWS = ("0.weight", "1.weight", "2.weight", "3.weight")


def initial(*rms: float, std: Sequence[float] = (), names: Sequence[str] = ROWS) -> dict[str, Any]:
    """Weights before the first update."""
    return {"initial.names": tuple(names[: len(rms)]), "initial.rms": rms, "initial.std": tuple(std)}


def equal(rms: float, std: float, *others: float) -> dict[str, Any]:
    """One weight of equal elements beside others."""
    return initial(rms, *[1.5] * len(others), std=(std, *others))


def gains(*found: float) -> dict[str, Any]:
    """Layers of 64 inputs whose weights began at these, times 1 / sqrt(inputs)."""
    layers = {"structure.trained": (*ROWS[: len(found)], "head.weight"), "structure.fan_ins": (64,) * 5}
    return layers | initial(*(gain / 8.0 for gain in found))


def rates(*last: float, before: float = 1.0, middle: float | None = None, count: int = 256) -> dict[str, Any]:
    """Learning rates that end with these."""
    made = [before] * (count - len(last)) + list(last)
    if middle is not None:
        made[count // 2] = middle
    return {"updates": count, "lrs": made}


def shrunk(now: float, *, name: str = "0.weight") -> dict[str, Any]:
    return initial(1.0, names=(name,)) | {"probe.names": (name,), "probe.weight_rms": (now,)}


def probes(count: int, **more: Any) -> dict[str, Any]:
    return {"trail.count": count, "trail.evaluating": count, "end": 0.7, **more}


def broken(*causes: str) -> dict[str, Any]:
    return {"end": 0.7, "incidents": tallies(*causes)}


def updated(*rms: float, norm: float = 1.0) -> dict[str, Any]:
    return {"end": 0.7, "probe.update_rms": rms, "norms": [1.0] * 255 + [norm]}


@at_limits(
    At(
        signs.frozen_head,
        {"structure.last_frozen": True},
        {
            "structure.last_frozen": (True, False),
            "structure.trained": (("0.weight",), ()),
            "loop.turns": (0, 1),
            "end": (0.81, 0.8),
        },
    ),
    At(
        signs.unusual_gains,
        gains(8.0, 8.0),
        {"opposed": (False, True), "end": LEARNED},
        also=(
            (gains(4.1, 1.0), gains(4.0, 1.0)),
            (gains(0.049, 1.0), gains(0.05, 1.0)),
            (gains(8.0, 1.0), gains(8.0, 1.0, 1.0)),
            ({"end": 0.1, "warned": ("early-divergence",)}, {"end": 0.1, "warned": ("loss-spike",)}),
            ({"end": 0.1, **broken("non-finite-loss")}, {"end": 0.1, "incidents": tallies("bad-batch")}),
            ({}, {"measured.rewarded": True}),
            (
                gains(8.0, 8.0, 8.0) | {"measured.rewarded": True},
                gains(8.0, 8.0, 1.0) | {"measured.rewarded": True},
            ),
            ({}, {"measured.initial": None, "structure.trained": ()}),
        ),
    ),
    At(
        signs.growing_rate,
        {"structure.announced": 1.0, **rates(11.0)},
        {"structure.announced": (1.0, 0.0)},
        also=(
            (rates(10.1), rates(10.0)),
            (rates(11.0, middle=5.4), rates(11.0, middle=5.5)),
            (rates(11.1, 11.0), rates(11.2, 11.0)),
            (rates(11.0, count=32), rates(11.0, count=31)),
            ({"end": 0.1, "noted": ("loss-spike",)}, {"end": 0.1}),
            ({"end": 0.1, "warned": ("loss-spike",)}, {"end": 0.1}),
            ({"end": 0.1, "incidents": tallies("bad-batch")}, {"end": 0.1}),
        ),
    ),
    At(
        signs.quick_decay,
        {"structure.weight_decay": 5.0, "lrs": [0.01] * 256},
        {
            "structure.weight_decay": (2.1, 2.0),
            "structure.scale_free": (False, True),
            "updates": (100, 99),
            "opposed": (False, True),
            "end": SOMEWHAT,
        },
        also=(
            ({"structure.scale_free": True, "structure.decoupled": True}, {"structure.scale_free": True}),
            (rates(0.01, before=0.001), rates(before=0.001)),
        ),
    ),
    At(
        signs.rate_of_zero,
        {"structure.rate_zero": ("0.weight",)},
        {
            "structure.rate_zero": [(("0.weight",), ()), (("0.weight",), ("0.weight", "2.weight"))],
            "structure.trained": (ROWS[:3], ROWS),
            "measured.updated": (set(), {"0.weight"}),
            "lrs": ([0.0] * 255 + [0.1], [0.0] * 256),
            "end": SOMEWHAT,
        },
    ),
    At(signs.mostly_frozen, {"structure.frozen": 5}, {"structure.frozen": (5, 4), "end": (0.81, 0.8)}),
    At(
        signs.rate_always_zero,
        rates(before=0.0) | {"structure.rate_zero": True},
        {
            "structure.rate_zero": (True, False),
            "structure.announced": (0.0, 0.1),
            "measured.updated": (set(), {"a"}),
            "structure.trained": (ROWS, ()),
        },
        also=((rates(before=0.0, count=32), rates(before=0.0, count=31)), ({}, rates(0.1, before=0.0))),
    ),
    At(
        signs.schedule_stays_at_zero,
        rates(before=0.0) | {"structure.announced": 0.1},
        {"structure.announced": (0.1, 0.0)},
        also=(({}, rates(0.1, before=0.0)),),
    ),
    At(
        signs.still_warming_up,
        {"structure.announced": 1.0, **rates(0.09, before=0.01)},
        {"end": (0.99, 0.9), "opposed": (False, True)},
        also=(
            (rates(0.099, before=0.01), rates(0.1, before=0.01)),
            (rates(0.09, before=0.044), rates(0.09, before=0.045)),
            (rates(0.09, 0.09, before=0.01), rates(0.091, 0.09, before=0.01)),
            (rates(0.09, before=0.01, count=100), rates(0.09, before=0.01, count=99)),
            ({}, rates(0.0, before=-0.01)),
        ),
    ),
    At(
        signs.schedule_ends_early,
        rates(*[0.0] * 200),
        {"end": SOMEWHAT},
        also=(
            (rates(*[0.0] * 128), rates(*[0.0] * 127)),
            (rates(*[0.011] * 128), rates(*[0.0111] * 128)),
            (rates(*[0.0] * 155, 0.011), rates(*[0.0] * 155, 0.0111)),
            (rates(*[0.0] * 200), rates(1.0, *[0.0] * 55, before=0.0)),
            (rates(*[0.0] * 50, count=100), rates(*[0.0] * 50, count=99)),
            ({}, rates(before=0.0)),
        ),
    ),
    At(
        signs.strong_dropout,
        {"structure.dropout": 0.9},
        {"structure.dropout": (0.9, 0.89), "updates": (100, 99), "end": SOMEWHAT},
    ),
    At(
        signs.strong_decay,
        {"structure.weight_decay": 0.1, **shrunk(0.4)},
        {"structure.weight_decay": (0.1, 0.0), "end": [LEARNED, (1.0, 0.9)], "updates": (60, 49)},
        also=((shrunk(0.5), shrunk(0.51)), ({}, shrunk(0.4, name="0.bias"))),
    ),
    At(
        signs.in_eval_mode,
        {"trail.evaluating": 8, "structure.modes": 1},
        {"trail.evaluating": (8, 7), "structure.modes": (1, 0), "end": SOMEWHAT},
        also=(
            (probes(3), probes(2)),
            (probes(1, warned=("early-divergence",)), probes(1, warned=("loss-spike",))),
            (probes(2, incidents=tallies("bad-batch")), probes(2)),
            (probes(2, end=1.0), probes(0, end=1.0)),
            (probes(8), probes(8) | {"last.evaluating_all": False}),
            ({"last.evaluating_all": False, "last.evaluating": True}, probes(8) | {"last.evaluating_all": False}),
            (probes(8) | {"trail.last": None}, probes(2) | {"trail.last": None}),
        ),
    ),
    At(
        signs.half_weights,
        {"structure.half": 1},
        {"structure.half": (1, 0), "end": LEARNED},
        also=(
            (broken("non-finite-gradient"), broken("bad-batch")),
            (broken("damaged-weights"), broken()),
            (broken("forward-overflow", "bad-batch"), broken()),
            (updated(0.0), updated(1e-3)),
            (updated(0.0, 0.0), updated(0.0, 1e-3)),
            (updated(0.0), updated()),
            (updated(0.0), updated(0.0, norm=0.0)),
            ({}, {"end": 0.7}),
        ),
    ),
    At(
        signs.rounded_away,
        {"structure.coarse": 1, "ratio": 1e-3},
        {
            "structure.coarse": (1, 0),
            "ratio": [(1.9e-3, 2e-3), (..., None)],
            "updates": (100, 99),
            "opposed": (False, True),
            "end": (0.75, 0.74),
        },
    ),
    At(
        signs.large_biases,
        initial(2.1, names=("0.bias",)),
        {"initial.rms": ((2.1,), (2.0,)), "initial.names": (("0.bias",), ("0.weight",)), "end": LEARNED},
        also=(({}, {"initial.names": (), "initial.rms": ()}),),
    ),
    At(
        signs.equal_weights,
        equal(2.0, 0.0, 1.0),
        {"updates": (100, 99), "end": SOMEWHAT, "initial.std": ((0.0, 1.0), ())},
        also=(
            (equal(2.0, 2e-6, 1.0), equal(2.0, 2.1e-6, 1.0)),
            (equal(2.0, 0.0), equal(0.0, 0.0)),
            (equal(2.0, 0.0, 1.0), equal(2.0, 0.0, 1.0, 1.0)),
            (equal(1.0, 0.0), equal(1.0, 0.0) | {"end": 0.7}),
            (equal(1.00001, 0.0) | {"end": 0.7}, equal(1.0, 0.0) | {"end": 0.7}),
            ({"end": 0.7}, {"end": 0.7, "measured.rewarded": True}),
            (
                equal(1.0, 0.0) | {"end": 0.9, "target.variance": 0.8, "curve.settled": False},
                equal(1.0, 0.0) | {"end": 0.9, "target.variance": 1.0, "curve.settled": False},
            ),
            ({}, {"initial.names": ("0.bias", "2.bias")}),
        ),
    ),
)
def test_it_is_said_at_its_limit_and_not_beyond(row: At) -> None:
    row.check()


@pytest.mark.parametrize(
    ("found", "named"), [((8.0, 0.01), "0.weight"), ((0.01, 0.01, 8.0), "0.weight, 1.weight"), ((8.0, 9.0), "8 / sqrt")]
)
def test_layers_that_are_too_large_come_before_those_that_are_too_small(found: tuple[float, ...], named: str) -> None:
    said = signs.unusual_gains(run(gains(*found)))
    assert named in said
    assert "2.weight" not in said


def test_the_end_of_a_schedule_names_its_step() -> None:
    assert "from 1 to 0 and has been below 0.01 since step 56" in signs.schedule_ends_early(run(rates(*[0.0] * 200)))


def test_dropouts_and_modes_are_named() -> None:
    assert "(a, b)" in signs.strong_dropout(run({"structure.dropout": 0.95, "structure.dropouts": ("a", "b")}))


def test_weights_shrink_by_the_median_of_all_but_biases() -> None:
    names = ("0.weight", "1.weight", "2.weight", "2.bias", "new.weight")
    before = {"initial.names": names[:4], "initial.rms": (2.0, 4.0, 0.0, 1.0)}
    now = {"probe.names": names, "probe.weight_rms": (1.0, 3.0, 9.0, 9.0, 9.0)}
    assert signs.shrinkage(run(before | now)) == pytest.approx(0.625)
    assert signs.shrinkage(run(before)) is None
    assert signs.shrinkage(run(now)) is None
    assert signs.shrinkage(run(before | {"probe.names": ("new.weight",), "probe.weight_rms": (1.0,)})) is None
