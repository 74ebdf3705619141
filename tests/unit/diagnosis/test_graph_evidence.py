"""Mechanisms that are plain in what was measured: named where the loss is not halved, silent where it is."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadystep.diagnosis.learning import base_of, is_policy
from steadystep.diagnosis.ranking import rank
from steadystep.examination.comparison import missed
from steadystep.records import Probe
from tests.unit.diagnosis.made import finding, tally
from tests.unit.diagnosis.test_mechanisms import FALLS, first, outputs, part, run

SLOWLY = [1.4 - 0.4 * step / 256 for step in range(256)]  # to 0.72 of the entropy of the labels: it learns, but little
ROWS = {"counted": 512, "distinct": 512}


def probe(*moves: float, step: int = 200, **more: Any) -> Probe:
    names = tuple(f"{place}.weight" for place in range(len(moves)))
    return Probe(step=step, names=names, weight_rms=(1.0,) * len(moves), update_rms=moves, **more)


def made_still(scale_free: bool) -> dict[str, Any]:
    return {"probe": probe(1e-9, 1e-9, 1e-2), "structure": {"scale_free": scale_free}}


@pytest.mark.parametrize(
    ("made", "named"),
    [
        ({"seen": outputs(severed=("0.weight",))}, "zero-gradient"),
        ({"seen": outputs(unheld=("1.weight",)), "structure": {"unheld": ("1.weight",)}}, "wrong-optimizer-params"),
        ({"seen": outputs(outside=1)}, "frozen-parameters"),
        ({"seen": outputs(sharpest=0.99)}, "saturation"),
        ({"seen": outputs(faintest=0.0)}, "output-independent-of-input"),
        ({"lrs": [1e-2] * 32 + [1e-4] * 224}, "schedule-error"),
    ],
)
def test_a_mechanism_counts_where_the_loss_is_not_halved(made: dict[str, Any], named: str) -> None:
    assert first(run(SLOWLY)) == "healthy"
    assert first(run(SLOWLY, **made)) == named
    if "severed" not in repr(made) or not made["seen"].severed:
        assert first(run(FALLS, **made)) == "healthy"


def test_a_spare_head_is_no_fault_in_a_run_that_learns() -> None:
    many = {"trained": tuple(f"{place}.weight" for place in range(8))}
    spare, body = outputs(severed=("7.weight",)), outputs(severed=tuple(f"{place}.weight" for place in range(4)))
    for seen, named in ((spare, "healthy"), (body, "zero-gradient")):
        made = run(FALLS, seen=seen)
        assert first(replace(made, structure=replace(made.structure, **many))) == named


@pytest.mark.parametrize(("scale_free", "named"), [(False, "vanishing-gradient"), (True, "learning-rate-too-low")])
def test_layers_without_updates_lack_a_gradient_or_a_rate(scale_free: bool, named: str) -> None:
    made = run(SLOWLY, **made_still(scale_free))
    made.measured.touched.update(("0.weight", "1.weight", "2.weight"))
    assert first(made) == named
    even = run(SLOWLY, probe=probe(1e-3, 1e-3, 1e-2))
    even.measured.touched.update(("0.weight", "1.weight", "2.weight"))
    assert first(even) == "healthy"


def test_layers_that_died_during_the_run_were_killed_by_large_updates() -> None:
    dead = probe(1e-3, modules=("1",), dead=(1.0,))
    for before, named in ((0.2, "learning-rate-too-high"), (1.0, "dead-units")):
        made = run(probe=dead, first_probe=probe(1e-3, step=1, modules=("1",), dead=(before,)))
        assert first(made) == named


@pytest.mark.parametrize(
    ("inputs", "targets", "named"),
    [
        ({"distinct": 13, "rows": 13}, {}, "repeated-batch"),
        ({"distinct": 13, "rows": 13}, {"whole": False, "distinct": 512}, "healthy"),
        ({"distinct": 13, "rows": 13, "values": 2}, {}, "healthy"),  # whole numbers, as in a code of ones and zeros
        ({"distinct": 500}, {}, "healthy"),
    ],
)
def test_the_same_few_samples_in_any_order(inputs: dict[str, Any], targets: dict[str, Any], named: str) -> None:
    given_ = part("[0]", **ROWS | {"whole": False, "shape": (8,), "values": 0} | inputs)
    wanted = part(**{"counted": 512, "distinct": 4} | targets)
    assert first(run(FALLS, parts=(given_, wanted))) == named


def test_updates_at_every_fourth_call_are_no_missing_zero_grad() -> None:
    for update, named in ((0.0, "healthy"), (1e-3, "missing-zero-grad")):
        made = run(FALLS, probe=probe(update), first_probe=probe(update, step=1))
        made.measured.loop.carried = 190
        assert first(made) == named


def test_a_task_that_is_solved_late_is_not_too_good_to_be_true() -> None:
    late, norms = FALLS[:64] + [0.0] * 192, [1.0] * 64 + [0.0] * 192
    assert first(run(late, norms=norms)) == "healthy"
    assert first(run([0.0] * 256, norms=[0.0] * 256)) == "suspicious-perfection"


def test_a_loss_without_a_bottom_comes_before_its_overflow() -> None:
    falls = [45.0 - 2.0**step for step in range(40)]
    broken = {"non-finite-gradient": tally(finding("non-finite", "act"))}
    made = run(falls, seen=outputs(kind="", target=None, terms=0), incidents=broken)
    made.measured.outputs.matches = {}
    assert first(made) == "wrong-loss"


def test_log_probabilities_of_numbers_of_the_batch_that_are_weighted_are_a_policys() -> None:
    seen = outputs(policy=True, kind="", target=None, terms=0)
    batch = (part("[0]", whole=False, shape=(6,)), part("[1]"), part("[2]", whole=False, smallest=0.0, largest=1.0))
    assert is_policy(run(seen=seen, parts=batch))
    assert not is_policy(run(seen=seen, parts=batch[:2]))  # a likelihood that is written by hand
    flat = (*batch[:2], part("[2]", whole=False, smallest=0.0, largest=0.0))
    assert first(run([0.0] * 256, norms=[0.0] * 256, seen=seen, parts=flat)) == "flat-reward"


def test_soft_targets_have_a_trivial_loss() -> None:
    soft = part(whole=False, entropy=float("nan"), marginal=2.0, conditional=0.5)
    assert base_of("kl", soft)[0] == pytest.approx(1.5)
    assert base_of("cross-entropy", soft)[0] == pytest.approx(2.0)
    assert base_of("kl", part())[0] is None


def test_margin_losses_want_signs() -> None:
    seen = outputs(kind="cosine embedding", target=part("['target']", smallest=0.0, largest=1.0))
    assert first(run(SLOWLY, seen=seen)) == "wrong-loss"
    signs = (part("[0]", whole=False), part(smallest=-1.0, largest=1.0))
    assert rank(run(FALLS, seen=outputs(kind="cosine embedding"), parts=signs))[0].cause == "healthy"


@given(st.floats(0.1, 10.0), st.floats(-5.0, 5.0), st.floats(0.0, 1.0), st.floats(0.0, 0.9))
def test_what_is_missed_has_no_units(scale: float, shift: float, reached: float, repaired: float) -> None:
    plain = missed(1.0, reached, repaired)
    assert missed(scale + shift, scale * reached + shift, scale * repaired + shift) == pytest.approx(plain, abs=1e-6)
    assert missed(1.0, 1.0, repaired) == 1.0
    assert missed(1.0, repaired, repaired) == 0.0
    assert missed(1.0, reached, float("nan")) == 0.0
