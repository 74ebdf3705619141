"""Weights that changed by something else than updates."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import steadystep
from steadystep.detectors import WeightJump
from steadystep.records import WEIGHTS_EVERY, Finding, Signals


def fed(norms: list[float], *, lrs: list[float] | None = None) -> list[Finding]:
    detector = WeightJump()
    rows = [
        Signals(step=20 * i, loss=1.0, grad_norm=1.0, lr=lr, weights=("w",), weight_norms=(norm,))
        for i, (norm, lr) in enumerate(zip(norms, lrs or [0.1] * len(norms), strict=True))
    ]
    return [finding for row in rows for finding in detector.update(row)]


STEADY = [10.0 + 0.01 * i for i in range(10)]


def test_a_jump_is_a_warning_with_the_tensor_and_the_last_good_look() -> None:
    for jump in (100.0, 15.6, 4.0, 0.0):
        (found,) = fed([*STEADY, jump, jump])
        assert (found.severity, found.where, found.since, found.step) == ("warn", ("w",), 180, 200)
        assert f"norm 10.1 at step 180, now {jump:.3g}" in found.what
        told = "changed over 10 times as much as ever between two looks" if jump else "became zero in every element"
        assert found.what.startswith(f"w {told}; ")


def test_one_that_is_no_longer_finite_asks_for_older_weights() -> None:
    for broken in (math.nan, math.inf):
        found = fed([*STEADY, broken, 10.1])
        assert [(f.severity, f.since) for f in found] == [("act", 180)]
    assert [f.severity for f in fed([math.nan])] == ["act"]


def test_what_is_no_jump() -> None:
    assert fed([*STEADY, 14.0]) == []  # less than half
    assert fed([10.0, 11.0, 30.0]) == []  # at the beginning
    assert fed([1.0 * 1.3**i for i in range(40)]) == []  # it grows as it always did
    lrs = [0.1] * 10 + [10.0] * 3
    assert fed([*STEADY, 11.0, 13.0, 19.0], lrs=lrs) == []  # updates a hundred times as large
    assert fed([0.0] * 40) == []
    assert fed([4.0] * 10 + [6.5, 9.0]) == []  # a group that was frozen begins to learn
    detector = WeightJump()
    for step in range(40):  # a bias around zero
        norms = (10.0, 0.01 if step < 30 else 0.7)
        row = Signals(step=20 * step, loss=1.0, grad_norm=1.0, lr=0.1, weights=("w", "b"), weight_norms=norms)
        assert detector.update(row) == ()


@given(st.floats(0.01, 0.3), st.floats(1.1, 40.0))
def test_between_looks_only_the_change_counts(drift: float, size: float) -> None:
    """Whatever the scale, a jump of ten times the usual change and half of the norm is one."""
    norms = [size * (1.0 + drift * 0.1 * i) for i in range(12)]
    assert fed(norms) == []
    assert len(fed([*norms, 2.6 * norms[-1]])) == 1


def test_a_row_that_no_batch_uses_is_seen_at_the_next_look() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(8, 1))
    guard = steadystep.Guard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config=steadystep.observe())
    noticed = []
    for step in range(140):
        if step == 101:
            with torch.no_grad():
                model[0].weight[15, 2] = math.nan
        x = torch.randint(0, 10, (16, 2))
        outcome = guard.step(lambda x: model(x).square().mean(), batch=x)
        noticed += [(outcome.step, f.detector) for f in outcome.findings if f.detector == "weight-jump"]
    assert noticed[0] == (107, "weight-jump")
    assert 107 % WEIGHTS_EVERY == 7


@pytest.mark.filterwarnings("ignore:.*these weights are fp16")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_have_norms_beyond_their_range(dtype: torch.dtype) -> None:
    model = nn.Linear(512, 512).to(dtype)
    with torch.no_grad():
        model.weight.fill_(300.0)
        model.bias.zero_()
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    for _ in range(8):
        outcome = guard.step(lambda: model(torch.full((2, 512), 1e-3, dtype=dtype)).float().mean())
    assert outcome.signals.weight_norms[0] == pytest.approx(300.0 * 512, rel=1e-2)
    assert outcome.stepped


def test_a_tensor_that_became_zero_is_a_jump_however_small_it_is_beside_others() -> None:
    def found(size: float, *, other: float = 100.0) -> list[Finding]:
        detector, views = WeightJump(), []
        for step in range(10):
            norms = (other, size * (1.0 + 0.2 * step) if step < 9 else 0.0)
            row = Signals(step=20 * step, loss=1.0, grad_norm=1.0, lr=0.1, weights=("w", "b"), weight_norms=norms)
            views += detector.update(row)
        return views

    assert [(f.where, f.step) for f in found(2.0)] == [(("b",), 180)]
    assert found(1e-3) == []  # decay may have done it


def test_a_zeroed_layer_is_seen_at_once_by_the_gradients_that_it_stops() -> None:
    """By the next look at the weights, updates have made the norms of these two all but usual again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(200, 16), nn.Flatten(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1))
    guard = steadystep.Guard(model, torch.optim.Adam(model.parameters(), lr=2e-2), config=steadystep.observe())
    noticed = []
    for step in range(130):
        if step == 108:
            with torch.no_grad():
                model[4].weight.zero_()
        x = torch.randint(0, 200, (16, 2))
        outcome = guard.step(lambda x: (model(x) - x[:, :1] / 200).square().mean(), batch=x)
        noticed += [(outcome.step, f.where) for f in outcome.findings if f.detector == "weight-jump"]
    assert noticed[0] == (108, ("4.weight",))
