"""The metrics of a policy, against plain loops over numbers."""

import math
from statistics import fmean
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from steadystep.errors import MisuseError
from steadystep.rl import Monitor, grad_norms_by_sign

LOGP = st.floats(-6.0, 0.0, allow_nan=False, width=32)
ROWS = st.integers(1, 5).flatmap(
    lambda n: st.lists(st.tuples(LOGP, LOGP, LOGP, st.booleans()), min_size=n, max_size=4 * n)
)


def measured(**tensors: Any) -> dict[str, float]:
    found = Monitor(clip=(0.2, 0.3)).measure(**tensors)
    assert all(isinstance(value, Tensor) and value.dim() == 0 for value in found.values())
    return {name: float(value) for name, value in found.items()}


@given(ROWS)
@settings(deadline=None)
def test_ratios_and_mismatch_are_those_of_a_plain_loop(rows: list[tuple[float, float, float, bool]]) -> None:
    logp, old, sampler, mask = (torch.tensor(column) for column in zip(*rows, strict=True))
    found = measured(logp=logp, old_logp=old, sampler_logp=sampler, mask=mask)
    kept = [row for row in rows if row[3]]
    if not kept:
        assert found["ratio_mean"] == 0.0
        return
    ratios = [math.exp(new - before) for new, before, _, _ in kept]
    weights = [math.exp(before - drawn) for _, before, drawn, _ in kept]
    apart = sorted(abs(before - drawn) for _, before, drawn, _ in kept)
    expected = {
        "ratio_mean": sum(ratios) / len(kept),
        "ratio_max": max(ratios),
        "kl_old": sum(r - 1.0 - math.log(r) for r in ratios) / len(kept),
        "mismatch": sum(apart) / len(kept),
        "mismatch_tail": apart[round(0.99 * (len(kept) - 1))],
        "ess": sum(weights) ** 2 / (len(kept) * sum(w * w for w in weights)),
        "entropy": -sum(row[1] for row in kept) / len(kept),
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=2e-3, abs=1e-4), name
    assert 0.0 < found["ess"] <= 1.0 + 1e-6


def test_the_clip_counts_only_what_the_update_would_push_further() -> None:
    logp, old = torch.tensor([0.5, 0.5, -0.5, -0.5]), torch.zeros(4)
    assert measured(logp=logp, old_logp=old)["clip_fraction"] == 1.0
    assert measured(logp=logp, old_logp=old, advantages=torch.tensor([1.0, -1.0, 1.0, -1.0]))["clip_fraction"] == 0.5
    rows = {"logp": logp.reshape(2, 2), "old_logp": old.reshape(2, 2)}
    assert measured(**rows, advantages=torch.tensor([1.0, 1.0]))["clip_fraction"] == 0.5


def test_a_ratio_beyond_all_numbers_stays_finite() -> None:
    found = measured(logp=torch.tensor([0.0, 0.0]), old_logp=torch.tensor([-1e4, 1e4]))
    assert found["ratio_max"] == pytest.approx(math.exp(20.0), rel=1e-4)
    assert all(map(math.isfinite, found.values()))


@pytest.mark.parametrize(
    ("rewards", "groups", "share"),
    [
        ([1.0, 1.0, 0.0, 1.0], 2, 0.5),
        ([1.0, 1.0, 1.0, 1.0], 2, 1.0),
        ([1.0, 0.0, 1.0, 0.0, 3.0], torch.tensor([7, 7, 2, 2, 9]), 1 / 3),
        ([1.0, 0.0, 1.0, 0.0], torch.tensor([5, -3, 5, -3]), 1.0),
    ],
)
def test_groups_with_equal_rewards(rewards: list[float], groups: Tensor | int, share: float) -> None:
    assert measured(rewards=torch.tensor(rewards), groups=groups)["zero_variance_groups"] == pytest.approx(share)


NUMBERS = st.floats(-9, 9, width=32).filter(lambda x: x == 0.0 or abs(x) > 1e-2)


@given(st.lists(st.tuples(st.integers(0, 3), NUMBERS, NUMBERS), min_size=2, max_size=30))
@settings(deadline=None)
def test_advantages_agree_with_rewards_inside_their_groups(rows: list[tuple[int, float, float]]) -> None:
    groups, rewards, advantages = zip(*rows, strict=True)

    def centred(values: tuple[float, ...]) -> list[float]:
        means = {g: fmean(v for v, of in zip(values, groups, strict=True) if of == g) for g in groups}
        return [v - means[g] for v, g in zip(values, groups, strict=True)]

    one, two = centred(rewards), centred(advantages)
    size = math.sqrt(sum(x * x for x in one) * sum(x * x for x in two))
    if size < 1e-1:
        return
    tensors = {"rewards": torch.tensor(rewards), "groups": torch.tensor(groups)}
    expected = sum(x * y for x, y in zip(one, two, strict=True)) / size
    for shape in ((-1,), (-1, 1)):
        found = measured(**tensors, advantages=torch.tensor(advantages).reshape(shape).expand(-1, *shape[1:] and (3,)))
        assert found["advantage_agreement"] == pytest.approx(expected, abs=1e-3)


def test_advantages_agree_with_returns_less_values() -> None:
    values, returns = torch.tensor([1.0, 2.0, 3.0, 9.0]), torch.tensor([2.0, 1.0, 5.0, -9.0])
    mask = torch.tensor([1, 1, 1, 0])
    for sign in (1.0, -1.0):
        advantages = sign * torch.tensor([1.0, -1.0, 2.0, 50.0])
        found = measured(values=values, returns=returns, advantages=advantages, mask=mask)
        assert found["advantage_agreement"] == pytest.approx(sign)
    assert measured(values=values, returns=values, advantages=values)["advantage_agreement"] == 0.0
    assert "advantage_agreement" not in measured(advantages=values)
    assert "advantage_agreement" not in measured(advantages=values, rewards=torch.tensor([1.0, 2.0]))


@given(st.lists(st.tuples(st.floats(-9, 9, width=32), st.floats(-9, 9, width=32)), min_size=2, max_size=30))
@settings(deadline=None)
def test_explained_variance(rows: list[tuple[float, float]]) -> None:
    values, returns = (torch.tensor(column) for column in zip(*rows, strict=True))
    found = measured(values=values, returns=returns)["explained_variance"]
    variance = float(returns.double().var(correction=0))
    if variance < 1e-4:
        return
    expected = 1.0 - float((returns - values).double().var(correction=0)) / variance
    assert found == pytest.approx(expected, rel=1e-2, abs=1e-2)


def test_a_perfect_and_a_constant_value_function() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0])
    assert measured(values=returns, returns=returns)["explained_variance"] == pytest.approx(1.0)
    assert measured(values=torch.ones(3), returns=returns)["explained_variance"] == pytest.approx(0.0)
    assert measured(values=returns, returns=torch.ones(3))["explained_variance"] == 0.0


def test_samples() -> None:
    found = measured(
        rewards=torch.tensor([0.0, 1.0]), lengths=torch.tensor([2, 8]), truncated=torch.tensor([False, True])
    )
    assert found == pytest.approx(
        {"reward": 0.5, "reward_std": 0.5, "response_length": 5.0, "length_correlation": 1.0, "truncated_share": 0.5}
    )


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(MisuseError, match="mask has shape"):
        Monitor().measure(logp=torch.zeros(2, 3), mask=torch.ones(2))
    with pytest.raises(MisuseError, match="multiple"):
        Monitor().measure(rewards=torch.zeros(5), groups=2)
    with pytest.raises(MisuseError, match="clip"):
        Monitor(clip=0.0)


def test_gradient_norms_by_sign_leave_gradients_and_graph_alone() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
    losses = weight * torch.tensor([3.0, -4.0])
    found = grad_norms_by_sign(losses, torch.tensor([1.0, -1.0]), [weight])
    assert {name: float(value) for name, value in found.items()} == {
        "grad_norm_positive": 1.5,
        "grad_norm_negative": 2.0,
    }
    assert weight.grad is None
    losses.sum().backward()
