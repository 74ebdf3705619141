"""Adam's second moments that fell further than beta2 lets them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import steadystep
from steadystep.detectors import LostMoments
from steadystep.detectors.build import decay_of
from steadystep.records import Finding, Signals

NAMES = ("exp_avg_sq of a", "exp_avg_sq of b", "exp_avg of a")


def fed(views: list[tuple[float, ...]], *, beta2: float = 0.999) -> list[Finding]:
    detector = LostMoments(beta2=beta2)
    rows = [
        Signals(step=20 * i, loss=1.0, grad_norm=1.0, state=NAMES[: len(peaks)], state_peaks=peaks)
        for i, peaks in enumerate(views)
    ]
    return [finding for row in rows for finding in detector.update(row)]


def test_cleared_moments_are_a_warning_once() -> None:
    (found,) = fed([(1.0, 2.0, 0.1)] * 5 + [(0.02, 0.04, 0.1)] * 5)
    assert (found.step, found.severity, found.since) == (100, "warn", 80)
    assert found.where == NAMES[:2]
    (gone,) = fed([(1.0, 2.0, 0.1)] * 5 + [(0.0, 0.0, 0.0)] * 3)
    assert gone.step == 100


def test_one_tensor_of_several_is_none() -> None:
    assert fed([(1.0, 2.0, 0.1)] * 5 + [(0.02, 2.0, 0.1)]) == []


def test_one_look_at_something_larger_is_no_measure() -> None:
    assert fed([(1.0, 2.0, 0.1)] * 3 + [(1e3, 2e3, 0.1)] + [(1.0, 2.0, 0.1)] * 2) == []


@given(st.lists(st.floats(0.0, 1e3), min_size=3, max_size=12), st.sampled_from([0.5, 0.9, 0.95, 0.999]))
def test_no_gradients_whatever_make_adam_look_like_it(sizes: list[float], beta2: float) -> None:
    """The reference is the optimizer itself: 20 updates per look with gradients of any size, zero too."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight], lr=1e-3, betas=(0.9, beta2))
    views = []
    for size in sizes:
        for _ in range(20):
            weight.grad = torch.full((3,), size)
            optimizer.step()
        views.append((float(optimizer.state[weight]["exp_avg_sq"].max()),))
    assert fed(views, beta2=beta2) == []


def run(clear: str) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    fresh = optimizer.state_dict()
    guard = steadystep.Guard(model, optimizer)
    told = []
    for step in range(160):
        if step == 100 and clear == "cleared":
            optimizer.state.clear()
        if step == 100 and clear == "loaded":
            optimizer.load_state_dict(fresh)
        outcome = guard.step(lambda b: (model(b).squeeze(-1) - b.sum(-1)).square().mean(), batch=torch.randn(16, 6))
        told += [finding.detector for finding in outcome.findings if finding.severity != "info"]
    guard.close()
    return told


@pytest.mark.parametrize(("clear", "told"), [("no", []), ("cleared", ["lost-moments"]), ("loaded", [])])
def test_in_a_run(clear: str, told: list[str]) -> None:
    """What the loop loads by itself is meant."""
    assert run(clear) == told


def test_only_optimizers_whose_rule_is_known() -> None:
    weight = nn.Parameter(torch.ones(3))
    adam = torch.optim.AdamW([{"params": [weight], "betas": (0.9, 0.99)}], betas=(0.9, 0.999))
    assert decay_of(adam) == 0.99
    assert decay_of(torch.optim.SGD([weight], lr=0.1)) is None

    class Own(torch.optim.Adam):
        pass

    assert decay_of(Own([weight])) is None
