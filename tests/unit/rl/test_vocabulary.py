"""One name for each metric; the curve of reward and entropy; coefficients."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadystep.errors import MisuseError
from steadystep.rl import METRICS, CeilingFit, Controls, canonical, translate


def test_no_alias_means_two_things() -> None:
    names = [name for metric in METRICS for name in (metric.name, *metric.aliases)]
    assert len(names) == len(set(names))
    assert all(canonical(metric.name) == metric.name for metric in METRICS)
    assert all(canonical(alias) == metric.name for metric in METRICS for alias in metric.aliases if "*" not in alias)


@pytest.mark.parametrize(
    ("logged", "name"),
    [
        ("actor/ppo_kl", "kl_old"),  # verl
        ("rollout_corr/rollout_is_eff_sample_size", "ess"),
        ("val-core/gsm8k/acc/mean@1", "held_out_reward"),
        ("completions/clipped_ratio", "truncated_share"),  # TRL
        ("sampling/sampling_logp_difference/mean", "mismatch"),
        ("train/gen_kl_error", "mismatch_kl"),  # NeMo-RL
        ("train/explained_variance", "explained_variance"),  # stable-baselines3
        ("losses/clipfrac", "clip_fraction"),  # CleanRL
        ("train/kl_coef", None),
        ("loss", None),
    ],
)
def test_names_of_libraries(logged: str, name: str | None) -> None:
    assert canonical(logged) == name


def test_units_and_doubles() -> None:
    assert translate({"train/token_mult_prob_error": 1.02}) == {"mismatch": pytest.approx(0.02)}
    assert translate({"critic/rewards/mean": 0.4}) == {"adjusted_reward": 0.4, "reward": 0.4}
    assert translate({"critic/rewards/mean": 0.4, "critic/score/mean": 0.5})["reward"] == 0.5
    assert translate({"kl": 1.0, "kl_ref": 2.0}) == {"kl_ref": 2.0}


@given(
    a=st.floats(0.01, 2.0),
    b=st.floats(-5.0, 5.0),
    entropies=st.lists(st.floats(0.0, 4.0), min_size=32, max_size=64),
)
def test_the_ceiling_of_a_run_on_the_curve(a: float, b: float, entropies: list[float]) -> None:
    if max(entropies) - min(entropies) < 0.1:
        return
    fit = CeilingFit()
    for entropy in entropies:
        fit.add(entropy=entropy, reward=b - a * math.exp(entropy))
    assert fit.a == pytest.approx(a, rel=1e-5)
    assert fit.ceiling == pytest.approx(b - a, rel=1e-5, abs=1e-5)


@given(
    st.lists(st.tuples(st.floats(-2, 30), st.floats(-1e6, 1e6) | st.just(math.nan)), max_size=80), st.integers(0, 80)
)
def test_the_fit_can_be_resumed(readings: list[tuple[float, float]], cut: int) -> None:
    whole, first, second = CeilingFit(), CeilingFit(), CeilingFit()
    for entropy, reward in readings:
        whole.add(entropy=entropy, reward=reward)
    for entropy, reward in readings[:cut]:
        first.add(entropy=entropy, reward=reward)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    for entropy, reward in readings[cut:]:
        second.add(entropy=entropy, reward=reward)
    assert second.state_dict() == whole.state_dict()


def test_no_forecast_from_readings_that_do_not_follow_it() -> None:
    fit = CeilingFit()
    for i in range(100):
        fit.add(entropy=i % 7 / 7, reward=i % 5)
    assert fit.ceiling is None
    for i in range(100):  # more entropy, more reward: nothing is spent
        fit.add(entropy=i / 10, reward=math.exp(i / 10))
    assert fit.ceiling is None


def test_coefficients_are_raised_four_times_at_most_and_survive_a_rollback() -> None:
    told: list[Any] = []
    controls = Controls(kl_coef=0.1, entropy_coef=0.0, on_change=lambda *change: told.append(change))
    before = controls.state_dict()
    assert [controls.raise_("kl_coef") for _ in range(5)] == [True] * 4 + [False]
    assert controls.kl_coef == 1.6
    assert controls.raise_("entropy_coef")
    assert controls.entropy_coef == 0.003
    assert told == [("kl_coef", 0.2), ("kl_coef", 0.4), ("kl_coef", 0.8), ("kl_coef", 1.6), ("entropy_coef", 0.003)]
    controls.load_state_dict(before)
    assert controls.kl_coef == 1.6
    fresh = Controls(kl_coef=0.1)
    fresh.load_state_dict(json.loads(json.dumps(controls.state_dict())))
    assert fresh.kl_coef == 1.6
    assert fresh.names == ()


def test_wrong_controls_are_named() -> None:
    with pytest.raises(MisuseError, match="kl_coef"):
        Controls(kl_coef=-1.0)
    with pytest.raises(MisuseError, match="evaluate"):
        Controls(evaluate=3)  # type: ignore[arg-type]
