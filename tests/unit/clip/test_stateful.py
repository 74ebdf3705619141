"""Clips that learn: a resumed one goes on exactly, asking changes nothing, and a broken state is refused."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from steadystep import ConfigError
from steadystep.clip import ClipReport, PercentileClip, TensorEMAClip, ZScoreClip

STATEFUL = {
    "z-score": lambda: ZScoreClip(warmup_steps=4, max_norm=3.0, restart_after_steps=3),
    "percentile": lambda: PercentileClip(percentile=60, history_steps=6),
    "tensor EMA": lambda: TensorEMAClip(warmup_steps=3),
}

every_stateful = pytest.mark.parametrize("make", STATEFUL.values(), ids=STATEFUL)


def step(clipper: Any, norms: tuple[float, float]) -> tuple[ClipReport, list[float]]:
    params = [Parameter(torch.ones(1)), Parameter(torch.ones(1))]
    for p, norm in zip(params, norms, strict=True):
        p.grad = torch.tensor([norm])
    report = clipper.clip_(params)
    return report, [p.grad.item() for p in params]


values = st.one_of(st.floats(1 / 64, 10, width=32), st.sampled_from([0.0, math.nan, math.inf, 1e4]))


@every_stateful
@given(norms=st.lists(st.tuples(values, values), max_size=25), cut=st.integers(0, 25))
def test_resume_is_invisible(make: Callable[[], Any], norms: list[tuple[float, float]], cut: int) -> None:
    whole, first, second = make(), make(), make()
    expected = [step(whole, n) for n in norms]
    got = [step(first, n) for n in norms[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    got += [step(second, n) for n in norms[cut:]]
    assert repr(got) == repr(expected)
    assert second.state_dict() == whole.state_dict()


def test_the_steps_towards_a_restart_are_saved() -> None:
    first, second = (ZScoreClip(warmup_steps=4, restart_after_steps=2) for _ in range(2))
    for norm in (1.0, 1.2, 0.8, 1.0, 50.0):
        first.learn(norm)
    second.load_state_dict(first.state_dict())
    assert second.limit(50.0) < 50.0
    second.learn(50.0)
    assert second.limit(50.0) == math.inf


@pytest.mark.parametrize("make", [STATEFUL["z-score"], STATEFUL["percentile"]], ids=["z-score", "percentile"])
@given(norms=st.lists(values, max_size=25))
def test_asking_and_telling_is_the_same_as_clipping(make: Callable[[], Any], norms: list[float]) -> None:
    clips, rule = make(), make()
    for norm in norms:
        report, after = step(clips, (norm, 0.0))
        state = rule.state_dict()
        limit = rule.limit(norm)
        assert rule.limit(norm) == limit
        assert rule.state_dict() == state, "asking changes nothing"
        rule.learn(norm)
        if report.finite:
            assert after[0] == pytest.approx(min(norm, limit), rel=1e-6)
            assert report.clipped == (norm > limit)
        else:
            assert limit == 0.0
    assert rule.state_dict() == clips.state_dict()


@given(norms=st.lists(st.tuples(values, values), max_size=15))
def test_asking_and_telling_tensor_by_tensor(norms: list[tuple[float, float]]) -> None:
    clips, rule = STATEFUL["tensor EMA"](), STATEFUL["tensor EMA"]()
    for pair in norms:
        report, after = step(clips, pair)
        named = {"0": pair[0], "1": pair[1]}
        limits = rule.limits(named)
        assert rule.limits(named) == limits
        rule.learn(named)
        if report.finite:
            expected = [min(n, limit) for n, limit in zip(pair, limits.values(), strict=True)]
            assert after == pytest.approx(expected, rel=1e-6)
    assert rule.state_dict() == clips.state_dict()


@every_stateful
@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, "1.0", None, 10**400])
def test_a_state_that_cannot_be_is_refused_and_changes_nothing(make: Callable[[], Any], bad: object) -> None:
    clipper = make()
    for seed in range(5):
        step(clipper, (0.5 + 0.01 * seed, 0.2))
    state = clipper.state_dict()

    def spoil(part: Any) -> Any:
        if isinstance(part, dict):
            return {k: spoil(v) for k, v in part.items()}
        if isinstance(part, list):
            return [spoil(v) for v in part]
        return bad if isinstance(part, float) else part

    for wrong in (spoil(state), {}, {**state, "more": 1}):
        with pytest.raises(ConfigError):
            clipper.load_state_dict(wrong)
        assert clipper.state_dict() == state


def test_a_level_whose_square_is_no_number_is_refused() -> None:
    clipper = ZScoreClip(warmup_steps=2)
    for seed in range(5):
        step(clipper, (0.5 + 0.01 * seed, 0.2))
    for key, value in (("mean", 1e308), ("variance", 1e300)):
        with pytest.raises(ConfigError, match=f"{key} = "):
            clipper.load_state_dict({**clipper.state_dict(), key: value})
    step(clipper, (0.5, 0.2))


@every_stateful
def test_a_state_is_a_copy(make: Callable[[], Any]) -> None:
    clipper = make()
    step(clipper, (0.1, 0.2))
    state = clipper.state_dict()
    text = json.dumps(state)
    step(clipper, (0.3, 0.1))
    assert json.dumps(state) == text
    assert json.dumps(clipper.state_dict()) != text
