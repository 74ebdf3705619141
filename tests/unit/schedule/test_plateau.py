"""Plateau: torch's decisions metric for metric, without its weakness for infinities, and resumable anywhere."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steadystep import ConfigError
from steadystep.schedule import Plateau

any_metric = st.floats(allow_nan=True, allow_infinity=True)
metrics = st.lists(st.integers(0, 60).map(lambda n: n / 20) | st.floats(0.0, 3.0) | st.just(math.nan), max_size=60)


@st.composite
def settings(draw: st.DrawFn) -> dict:
    return {
        "mode": draw(st.sampled_from(["min", "max"])),
        "factor": draw(st.floats(0.05, 0.95)),
        "patience": draw(st.integers(0, 4)),
        "threshold": draw(st.sampled_from([0.0, 1e-4, 0.1])),
        "threshold_mode": draw(st.sampled_from(["rel", "abs"])),
        "cooldown": draw(st.integers(0, 3)),
    }


@given(settings(), metrics, st.sampled_from([0.0, 0.01, 0.3]))
def test_it_is_torchs_reduce_on_plateau(chosen: dict, seen: list[float], floor: float) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, min_lr=floor, **chosen)
    ours = Plateau(floor=floor, **chosen)
    for metric in seen:
        theirs.step(metric)
        ours.update(metric)
        assert ours(0) == optimizer.param_groups[0]["lr"]


@given(settings(), st.lists(any_metric, max_size=40), st.integers(0, 40))
def test_resume_through_json_is_invisible(chosen: dict, seen: list[float], cut: int) -> None:
    whole, first, second = (Plateau(**chosen) for _ in range(3))
    for metric in seen[:cut]:
        whole.update(metric)
        first.update(metric)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    for metric in seen[cut:]:
        whole.update(metric)
        second.update(metric)
        assert whole(0) == second(0)
    assert whole.state_dict() == second.state_dict()


@given(settings(), st.lists(any_metric, max_size=60), st.floats(0.0, 1.0))
def test_the_multiplier_only_falls_and_never_under_the_floor(chosen: dict, seen: list[float], floor: float) -> None:
    plateau, before = Plateau(floor=floor, **chosen), 1.0
    for metric in seen:
        plateau.update(metric)
        assert floor <= plateau(0) <= before
        before = plateau(0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_non_finite_metric_counts_as_no_improvement_and_is_not_remembered(mode: str, bad: float) -> None:
    plateau = Plateau(mode=mode, patience=1, factor=0.5)
    for metric in (1.0, bad, bad):
        plateau.update(metric)
    assert plateau(0) == 0.5
    assert plateau.state_dict()["best"] == 1.0


def test_metrics_may_be_tensors() -> None:
    plateau = Plateau(patience=0)
    plateau.update(torch.tensor(1.0))
    plateau.update(torch.tensor(1.0))
    assert plateau(0) == 0.1


@pytest.mark.parametrize(("mode", "better"), [("min", 8.9), ("max", 11.1)])
def test_better_is_a_share_of_the_best_or_an_amount(mode: str, better: float) -> None:
    relative, absolute = (
        Plateau(mode=mode, patience=0, threshold=0.1, threshold_mode=kind, factor=0.5) for kind in ("rel", "abs")
    )
    for plateau in (relative, absolute):
        plateau.update(10.0)
        plateau.update((10.0 + better) / 2)
    assert (relative(0), absolute(0)) == (0.5, 1.0)
    relative.update(better)
    assert relative.state_dict()["best"] == better


def test_cuts_too_small_to_matter_are_not_made() -> None:
    plateau = Plateau(patience=0, factor=0.1, eps=0.1)
    for _ in range(9):
        plateau.update(1.0)
    assert plateau(0) == 0.1


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"mode": "least"}, "mode = 'least': use 'min' or 'max'"),
        ({"threshold_mode": "none"}, "use 'rel' or 'abs'"),
        ({"factor": 1.0}, "factor = 1.0: must be below 1"),
        ({"factor": 0.0}, "factor = 0.0"),
        ({"factor": 1.5}, "factor = 1.5"),
        ({"factor": math.nan}, "factor = nan"),
        ({"patience": -1}, "patience = -1"),
        ({"threshold": -1e-4}, "threshold = -0.0001"),
        ({"threshold": 1.0}, "below 1 when relative"),
        ({"threshold": math.inf}, "threshold = inf"),
        ({"cooldown": 0.5}, "cooldown = 0.5"),
        ({"floor": 2.0}, "floor = 2.0"),
        ({"warmup_steps": -2}, "steps = -2"),
    ],
)
def test_settings_that_mean_nothing(setting: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=r"^schedule") as caught:
        Plateau(**setting)
    assert says in str(caught.value)
