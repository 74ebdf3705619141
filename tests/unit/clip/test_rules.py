"""Rules that learn a limit: equal to their slow twins, sound at the edges, honest about what they do not do."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from steadystep import ConfigError
from steadystep.clip import NormRule, PercentileClip, TensorEMAClip, ZScoreClip
from tests.reference import clip_rules as twin

healthy = st.floats(1e-3, 1e3)
odd = st.sampled_from([0.0, math.nan, math.inf, -math.inf, 1e-30, 1e30])
sequences = st.lists(st.one_of(healthy, healthy, healthy, odd), max_size=60)


def limits(rule: NormRule, norms: list[float]) -> list[float]:
    found = []
    for norm in norms:
        found.append(rule.limit(norm))
        rule.learn(norm)
    return found


@given(
    norms=sequences,
    z_threshold=st.floats(0.5, 4),
    alpha=st.floats(0.5, 0.99),
    warmup_steps=st.integers(1, 30),
    max_norm=st.sampled_from([None, 1.0, 50.0]),
)
def test_z_score_is_its_twin(norms, z_threshold, alpha, warmup_steps, max_norm) -> None:
    settings = {"z_threshold": z_threshold, "alpha": alpha, "warmup_steps": warmup_steps}
    got = limits(ZScoreClip(**settings, max_norm=max_norm), norms)
    expected = twin.zclip(norms, **settings, max_norm=math.inf if max_norm is None else max_norm)
    assert got == pytest.approx(expected, rel=1e-6)


@given(norms=sequences, percentile=st.floats(1, 100), history_steps=st.integers(1, 20))
def test_percentile_is_its_twin(norms, percentile, history_steps) -> None:
    settings = {"percentile": percentile, "history_steps": history_steps}
    assert limits(PercentileClip(**settings), norms) == pytest.approx(twin.autoclip(norms, **settings), rel=1e-9)


@given(
    steps=st.lists(st.tuples(*[st.one_of(healthy, healthy, odd)] * 3).map(list), max_size=40),
    relative_limit=st.floats(1.01, 3),
    beta=st.floats(0.5, 0.99),
    warmup_steps=st.integers(1, 12),
    warmup_max_norm=st.floats(0.1, 10),
)
def test_tensor_ema_is_its_twin(steps, **settings) -> None:
    clip = TensorEMAClip(**settings)
    steps = [norms for norms in steps if max(norms) < 1e20 or not math.isfinite(max(norms))]
    for norms, expected in zip(steps, twin.adagc(steps, **settings), strict=True):
        named = {"abc"[i]: abs(n) for i, n in enumerate(norms)}
        if all(math.isfinite(n) for n in norms):
            found = [min(n, limit) for n, limit in zip(norms, clip.limits(named).values(), strict=True)]
            assert found == pytest.approx(expected, rel=1e-9)
        else:
            assert set(clip.limits(named).values()) == {0.0}
        clip.learn(named)


def test_the_defaults_are_the_papers() -> None:
    norms = [1.0 + 0.1 * math.sin(n) for n in range(40)] + [30.0, 1.0, 2.0]
    paper = twin.zclip(norms, z_threshold=2.5, alpha=0.97, warmup_steps=25)
    assert limits(ZScoreClip(), norms) == pytest.approx(paper)
    assert limits(PercentileClip(), norms) == pytest.approx(twin.autoclip(norms, percentile=10, history_steps=1000))
    steps = [[n, 2 * n] for n in norms * 4]
    clip = TensorEMAClip()
    expected = twin.adagc(steps, relative_limit=1.05, beta=0.98, warmup_steps=100, warmup_max_norm=1.0)
    for (a, b), after in zip(steps, expected, strict=True):
        found = clip.limits({"a": a, "b": b})
        assert [min(a, found["a"]), min(b, found["b"])] == pytest.approx(after)
        clip.learn({"a": a, "b": b})


def test_an_outlier_is_held_back_the_harder_the_farther_out() -> None:
    rule = ZScoreClip(warmup_steps=10)
    limits(rule, [1.0, 1.2] * 5)
    assert rule.limit(1.3) == math.inf
    assert rule.limit(1.5) < 1.5
    assert 1.1 < rule.limit(100.0) < rule.limit(10.0) < rule.limit(2.0) < 1.1 + 2.5 * 0.1


def test_max_norm_holds_in_warm_up_and_teaches_nothing() -> None:
    rule, free = ZScoreClip(warmup_steps=5, max_norm=0.5), ZScoreClip(warmup_steps=5)
    norms = [1.0, 1.1, 0.9, 1.0, 1.2, 1.0, 1.1]
    assert limits(rule, norms) == [0.5] * 7
    limits(free, norms)
    assert rule.state_dict() == free.state_dict()


def jump(rule: ZScoreClip) -> int:
    rng = np.random.default_rng(0)
    limits(rule, (1 + 0.1 * rng.standard_normal(25)).tolist())
    shifted = (10 + rng.standard_normal(400)).tolist()
    return sum(norm > limit for norm, limit in zip(shifted, limits(rule, shifted), strict=True))


def test_a_lasting_jump_is_clipped_for_ever_as_published_and_accepted_on_request() -> None:
    assert jump(ZScoreClip()) == 400
    assert jump(ZScoreClip(restart_after_steps=20)) < 60


def test_a_restart_needs_steps_in_a_row() -> None:
    rule = ZScoreClip(warmup_steps=4, restart_after_steps=2)
    limits(rule, [1.0, 1.2, 0.8, 1.0])
    limits(rule, [50.0, 1.0, 50.0])
    assert rule.state_dict()["ready"]
    rule.learn(50.0)
    assert rule.limit(50.0) == math.inf
    assert rule.state_dict() == ZScoreClip().state_dict()


def test_percentile_follows_a_new_level_and_forgets_the_old() -> None:
    rule = PercentileClip(percentile=50, history_steps=10)
    limits(rule, [1.0] * 10 + [5.0] * 10)
    assert rule.limit(100.0) == 5.0
    assert rule.state_dict()["history"] == [5.0] * 10


def test_a_gradient_that_was_zero_does_not_silence_its_tensor() -> None:
    clip = TensorEMAClip(warmup_steps=2)
    for norm in (0.0, 0.5, 0.5):
        clip.learn({"a": norm})
    assert clip.limits({"a": 3.0})["a"] == pytest.approx(1.05 * 0.5)
    for rule in (ZScoreClip(warmup_steps=2), PercentileClip()):
        limits(rule, [0.0, 0.0, 0.0])
        assert rule.limit(3.0) >= 3.0


def test_in_warm_up_the_smallest_norm_of_a_tensor_counts() -> None:
    clip = TensorEMAClip(warmup_steps=2)
    for norm in (0.5, 0.8):
        clip.learn({"a": norm})
    assert clip.limits({"a": 3.0})["a"] == pytest.approx(1.05 * 0.5)


def test_a_tensor_that_comes_late_has_a_warm_up_of_its_own() -> None:
    clip = TensorEMAClip(warmup_steps=2)
    for _ in range(3):
        clip.learn({"old": 0.5})
    found = clip.limits({"old": 0.6, "new": 0.2})
    assert found == {"old": pytest.approx(0.525), "new": math.inf}
    found = clip.limits({"old": 3.0, "new": 4.0})
    assert found == {"old": pytest.approx(0.525), "new": pytest.approx(0.8)}


def test_tensors_are_clipped_one_by_one() -> None:
    clip = TensorEMAClip(warmup_steps=1)
    a, b, c = (Parameter(torch.zeros(2, dtype=d)) for d in (torch.float32, torch.float64, torch.bfloat16))
    for scale in (0.1, 1.0):
        for p in (a, b, c):
            p.grad = torch.tensor([0.0, scale if p is not b else 0.1]).to(p.dtype)
        report = clip.clip_([a, b, c])
    assert a.grad[1].item() == pytest.approx(0.105)
    assert b.grad[1].item() == pytest.approx(0.1)
    assert c.grad[1].item() == pytest.approx(0.105, rel=1e-2)
    assert report.norm_before == pytest.approx(math.sqrt(2.01))
    assert report.scale == pytest.approx(math.sqrt(0.105**2 * 2 + 0.1**2) / math.sqrt(2.01), rel=1e-2)


def test_tensors_of_one_dtype_have_factors_of_their_own() -> None:
    clip = TensorEMAClip(warmup_steps=1)
    parameters = [Parameter(torch.zeros(1)) for _ in range(3)]
    for norms in ((0.1, 0.1, 0.1), (4.0, 0.1, 2.0)):
        for p, norm in zip(parameters, norms, strict=True):
            p.grad = torch.tensor([norm])
        clip.clip_(parameters)
    assert [p.grad.item() for p in parameters] == pytest.approx([0.105, 0.1, 0.105])


def test_a_parameter_given_twice_is_clipped_once() -> None:
    clip = TensorEMAClip(warmup_max_norm=1.0)
    p = Parameter(torch.zeros(1))
    p.grad = torch.tensor([4.0])
    assert clip.clip_([("tied", p), ("also", p)]).norm_before == 4.0
    assert p.grad.item() == 1.0
    assert list(clip.state_dict()["tensors"]) == ["tied"]


def test_tiny_gradients_are_brought_to_the_limit_and_not_below() -> None:
    clip = ZScoreClip(warmup_steps=4)
    p = Parameter(torch.zeros(1))
    for norm in (1e-7, 1.2e-7, 0.8e-7, 1e-7, 1e-3):
        p.grad = torch.tensor([norm])
        report = clip.clip_([p])
    assert report.clipped
    assert p.grad.item() == pytest.approx(1e-7, rel=0.1)
    rule = PercentileClip(percentile=50)
    limits(rule, [1e-7] * 3)
    p.grad = torch.tensor([1e-6])
    rule.clip_([p])
    assert p.grad.item() == pytest.approx(1e-7)


@pytest.mark.parametrize("norm", [1e-300, 1e300, 1e120])
def test_norms_at_the_ends_of_the_scale(norm: float) -> None:
    for rule in (ZScoreClip(warmup_steps=3), PercentileClip(history_steps=3)):
        limits(rule, [norm, 1.0, norm, 2.0, norm, 1.0, norm])
        assert rule.limit(1.5) > 0.0
        json.dumps(rule.state_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("make", "bad"),
    [
        (ZScoreClip, {"z_threshold": 0.0}),
        (ZScoreClip, {"z_threshold": math.nan}),
        (ZScoreClip, {"alpha": 1.0}),
        (ZScoreClip, {"alpha": 0.0}),
        (ZScoreClip, {"warmup_steps": 0}),
        (ZScoreClip, {"warmup_steps": True}),
        (ZScoreClip, {"max_norm": -1.0}),
        (ZScoreClip, {"restart_after_steps": 0}),
        (PercentileClip, {"percentile": 0.0}),
        (PercentileClip, {"percentile": 101.0}),
        (PercentileClip, {"percentile": "10"}),
        (PercentileClip, {"history_steps": 2.5}),
        (TensorEMAClip, {"relative_limit": 1.0}),
        (TensorEMAClip, {"beta": 2.0}),
        (TensorEMAClip, {"warmup_steps": -1}),
        (TensorEMAClip, {"warmup_max_norm": 0.0}),
    ],
)
def test_settings_that_mean_nothing_are_named(make, bad) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        make(**bad)


@pytest.mark.parametrize("make", [lambda: PercentileClip(percentile=50), lambda: TensorEMAClip(warmup_max_norm=0.3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_scaled_by_the_exact_factor(make, dtype) -> None:
    clip = make()
    if isinstance(clip, PercentileClip):
        limits(clip, [0.3, 0.3, 0.3])
    p = Parameter(torch.zeros(64, dtype=dtype))
    p.grad = torch.randn(64).to(dtype)
    before = p.grad.float()
    report = clip.clip_([p])
    assert report.norm_before * report.scale == pytest.approx(0.3)
    assert torch.equal(p.grad, (before * report.scale).to(dtype))
