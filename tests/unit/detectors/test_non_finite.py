"""NaN and infinity, told apart: which are refused, which are a scaler's routine, and which a loss merely reports."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steadystep
from steadystep.detectors import NonFinite
from steadystep.records import Signals

GOOD = Signals(step=0, loss=2.0, losses=(2.0,), grad_norm=1.0, lr=0.1)
TERM = replace(GOOD, loss=math.nan, losses=(math.nan,))  # and every gradient is finite


def heard(detector: NonFinite, steps: dict[int, Signals]) -> list[str]:
    return [f.severity for step, look in steps.items() for f in detector.update(replace(look, step=step))]


def test_a_loss_that_is_nan_again_and_again_over_finite_gradients_is_refused_twice_and_told_once() -> None:
    assert heard(NonFinite(), dict.fromkeys(range(10), TERM)) == ["critical", "critical", "warn"] + ["info"] * 7


def test_far_apart_each_is_refused() -> None:
    assert heard(NonFinite(), dict.fromkeys((0, 150, 300, 450), TERM)) == ["critical"] * 4


@pytest.mark.parametrize(
    "change",
    [{"grad_norm": math.nan}, {"grad_norm": math.inf}, {"bad_buffers": ("running_var",)}, {"input_finite": False}],
    ids=str,
)
def test_with_anything_else_that_is_not_finite_it_is_always_refused(change: dict[str, Any]) -> None:
    bad = replace(TERM, **change)
    assert "critical" in heard(NonFinite(), {0: TERM, 1: TERM, 2: TERM, 3: bad})
    assert set(heard(NonFinite(), dict.fromkeys(range(10), bad))) == {"critical"}


def test_those_do_not_count_as_a_term_without_a_gradient() -> None:
    bad = replace(TERM, grad_norm=math.nan)
    assert heard(NonFinite(), {0: bad, 1: bad, 2: TERM})[-1] == "critical"


def test_it_is_remembered_over_a_resume() -> None:
    for count in range(5):
        whole, first, second = NonFinite(), NonFinite(), NonFinite()
        for each in (whole, first):
            heard(each, dict.fromkeys(range(count), TERM))
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        rest = dict.fromkeys(range(count, 8), TERM)
        assert heard(second, rest) == heard(whole, rest)
    NonFinite().load_state_dict({})  # as older ones were saved


def test_a_run_whose_loss_has_such_a_term_learns() -> None:
    """A penalty of log 0 that has no gradient: the updates are those without it, but for two."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.05))
    generator, outcomes = torch.Generator().manual_seed(1), []
    for _ in range(100):
        x = torch.randn(32, 4, generator=generator)

        def loss(x: Tensor) -> Tensor:
            return (model(x).squeeze(-1) - x.sum(-1)).square().mean() + torch.tensor(-math.inf)

        outcomes.append(guard.step(loss, batch=x))
    assert [outcome.stepped for outcome in outcomes] == [False] * 2 + [True] * 98
    assert guard.updates == 98
    assert torch.allclose(model.weight, torch.ones(1, 4), atol=0.05)
    assert sum(f.severity == "warn" for outcome in outcomes for f in outcome.findings) == 1


@pytest.mark.parametrize("clips", [True, False])
def test_a_spike_that_the_loop_has_clipped_is_a_note(clips: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator, said = torch.Generator().manual_seed(1), []
    with steadystep.watch(model, optimizer) as watcher:
        for step in range(200):
            x = torch.randn(32, 4, generator=generator)
            optimizer.zero_grad()
            loss = (model(x).squeeze(-1) - x.sum(-1) - torch.randn(32, generator=generator)).square().mean()
            loss = loss + (1e4 - 1.0) * (loss - loss.detach()) if step == 190 else loss
            loss.backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            assert watcher.outcome is not None
            said += [(step, f.severity) for f in watcher.outcome.findings if f.detector == "gradient-spike"]
            assert watcher.outcome.stepped or (step == 190 and not clips)
    assert said == [(190, "info" if clips else "act")]
