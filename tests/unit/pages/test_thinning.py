import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadystep.pages.charts import thin, typical
from steadystep.runs.run import Series

ANY = st.floats(width=32) | st.just(float("nan")) | st.just(float("inf"))


@st.composite
def curves(draw: st.DrawFn) -> Series:
    values = draw(st.lists(ANY, max_size=300))
    gaps = draw(st.lists(st.integers(0, 40), min_size=len(values), max_size=len(values)))
    steps = np.cumsum(np.array(gaps, dtype=np.int64)) if gaps else np.empty(0, dtype=np.int64)
    return Series(steps, np.array(values, dtype=np.float64))


def buckets_of(steps: np.ndarray, buckets: int) -> np.ndarray:
    """The slow twin: in which stretch each step is."""
    span = max(float(steps[-1] - steps[0]), 1.0)
    return np.array([min(int((float(s) - float(steps[0])) / span * buckets), buckets - 1) for s in steps])


@given(curves(), st.integers(1, 40))
def test_the_extremes_of_every_bucket_survive(series: Series, buckets: int) -> None:
    got = thin(series, buckets=buckets)
    if not len(series):
        assert not len(got.steps)
        return
    place, kept = buckets_of(series.steps, buckets), buckets_of_kept(series, got.steps, buckets)
    for bucket in set(place.tolist()):
        inside = series.values[place == bucket]
        finite = inside[np.isfinite(inside)]
        shown = got.values[kept == bucket]
        if len(finite):
            assert finite.min() in shown
            assert finite.max() in shown
        if len(finite) < len(inside):
            assert not np.isfinite(shown).all(), "a NaN must stay visible"


def buckets_of_kept(series: Series, steps: np.ndarray, buckets: int) -> np.ndarray:
    place = buckets_of(series.steps, buckets)
    return np.array([place[np.searchsorted(series.steps, step)] for step in steps])


@given(curves(), st.integers(1, 40))
def test_it_is_short_in_order_and_made_of_what_was_there(series: Series, buckets: int) -> None:
    got = thin(series, buckets=buckets)
    assert len(got.steps) <= max(2 * buckets, min(len(series), 3 * buckets + 2))
    assert (np.diff(got.steps) >= 0).all()
    there = {(s, repr(v)) for s, v in zip(series.steps.tolist(), series.values.tolist(), strict=True)}
    assert {(s, repr(v)) for s, v in zip(got.steps.tolist(), got.values.tolist(), strict=True)} <= there
    if len(series):
        assert (got.steps[0], got.steps[-1]) == (series.steps[0], series.steps[-1])


@given(curves())
def test_json_has_a_name_for_every_gap(series: Series) -> None:
    told = json.loads(json.dumps(thin(series, buckets=10).for_json(), allow_nan=False))
    assert [step for step, value in zip(told["x"], told["y"], strict=True) if value is None] == [
        s for s, _ in told["bad"]
    ]
    assert {name for _, name in told["bad"]} <= {"NaN", "inf", "-inf"}


def test_one_spike_or_gap_among_a_hundred_thousand_steps_is_kept() -> None:
    values = np.ones(100_000)
    values[54_321], values[54_322], values[70_000] = 1e6, np.nan, -np.inf
    got = thin(Series(np.arange(100_000), values), buckets=600)
    assert {54_321, 54_322, 70_000} <= set(got.steps.tolist())
    assert len(got.steps) < 2000


def test_a_window_reaches_one_point_beyond_its_edges() -> None:
    series = Series(np.arange(0, 100, 10), np.arange(10.0))
    assert thin(series, buckets=50, first=25, last=52).steps.tolist() == [20, 30, 40, 50, 60]
    assert thin(series, buckets=50, first=500).steps.tolist() == [90]


def test_the_typical_line_ignores_spikes() -> None:
    values = np.ones(1000)
    values[::50] = 100.0
    assert typical(Series(np.arange(1000), values), buckets=20).values.max() == 1.0


@pytest.mark.parametrize("steps", [[0], [7, 7, 7], [0, 2**62 - 1]])
def test_odd_steps_are_no_trouble(steps: list[int]) -> None:
    series = Series(np.array(steps, dtype=np.int64), np.arange(float(len(steps))))
    assert len(thin(series, buckets=1).steps) >= 1
