"""Streaming estimators against their slow twins, and what they promise about NaN, resuming and shifts."""

import json
import math
import random
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadystep.stats import Cusum, Level, Tail, Window
from tests.reference.stats import SlowLevel, at_share, cusum, tail_limit

finite = st.floats(-1e6, 1e6)
anything = finite | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0])
act = st.one_of(
    st.tuples(st.just("accept"), anything),
    st.tuples(st.just("accept"), anything),
    st.tuples(st.just("reject"), st.sampled_from([5.0, 5.5, 6.0, 50.0, math.nan])),
    st.tuples(st.just("again"), st.just(0.0)),
)


def do(level: Level | SlowLevel, kind: str, value: float) -> Any:
    if kind == "accept":
        level.accept(value)
    elif kind == "again":
        level.start_again([value] if value else [])
    else:
        return level.reject(value, agreement=1.0)
    return (level.armed, *(None if x != x else x for x in (level.median, level.spread)))


class TestLevel:
    @given(st.lists(act, max_size=120), st.sampled_from([5, 32, 40]), st.sampled_from([(3, 2), (24, 12)]))
    def test_does_what_its_slow_twin_does(
        self, acts: list[tuple[str, float]], size: int, patience: tuple[int, int]
    ) -> None:
        armed_after, rejects = patience
        level = Level(size, armed_after=armed_after, patience=rejects)
        twin = SlowLevel(size, armed_after=armed_after, patience=rejects)
        for kind, value in acts:
            assert do(level, kind, value) == do(twin, kind, value)
            assert level.rejected_in_a_row == len(twin.rejected)

    @given(st.integers(0, 10_000), st.integers(33, 200), st.integers(0, 200))
    def test_long_windows_are_read_every_sixteenth_time_resumed_or_not(self, seed: int, count: int, cut: int) -> None:
        rng = random.Random(seed)
        level, twin = Level(64), SlowLevel(64, armed_after=24, patience=12)
        for i in range(count):
            if i == cut:
                saved = level.state_dict()
                level = Level(64)
                level.load_state_dict(saved)
            value = rng.gauss(0.0, 1.0)
            assert do(level, "accept", value) == do(twin, "accept", value)

    @given(st.lists(act, max_size=80), st.integers(0, 80))
    def test_saved_anywhere_and_loaded_it_goes_on(self, acts: list[tuple[str, float]], cut: int) -> None:
        whole, first, second = Level(40), Level(40), Level(40)
        second.accept(77.0)  # a used one forgets what it knew
        for kind, value in acts[:cut]:
            do(whole, kind, value)
            do(first, kind, value)
        second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
        for kind, value in acts[cut:]:
            assert do(whole, kind, value) == do(second, kind, value)
        assert whole.state_dict() == second.state_dict()

    @given(st.lists(finite, min_size=1, max_size=60), st.data())
    def test_what_is_not_finite_leaves_no_trace(self, values: list[float], data: st.DataObject) -> None:
        clean, dirty = Level(32), Level(32)
        for value in values:
            clean.accept(value)
            dirty.accept(data.draw(st.sampled_from([math.nan, math.inf, -math.inf])))
            dirty.accept(value)
            assert not dirty.reject(math.nan, agreement=math.inf)
        assert clean.state_dict() == dirty.state_dict()

    def test_is_armed_by_24_values_and_not_by_23(self) -> None:
        level = Level()
        for _ in range(23):
            level.accept(1.0)
        assert not level.armed
        level.accept(1.0)
        assert level.armed

    @given(st.lists(finite, min_size=3, max_size=32), st.floats(0.0, 1e6))
    def test_only_what_lies_above_the_median_counts(self, values: list[float], deeper: float) -> None:
        plain, lowered = Level(32), Level(32)
        for value in values:
            plain.accept(value)
        for value in values:
            lowered.accept(value - deeper if value < plain.median else value)
        assert (lowered.median, lowered.spread) == (plain.median, plain.spread)
        assert plain.spread >= 0.0

    def test_the_spread_is_one_sigma(self) -> None:
        rng = random.Random(0)
        level = Level(4096)
        for _ in range(4096):
            level.accept(rng.gauss(3.0, 0.5))
        assert level.median == pytest.approx(3.0, abs=0.03)
        assert level.spread == pytest.approx(0.5, abs=0.03)

    def test_follows_a_drift_of_twenty_times_and_never_takes_it_for_outliers(self) -> None:
        rng = random.Random(0)
        level = Level()
        for i in range(3000):
            value = math.log(20.0) * i / 3000 + rng.gauss(0.0, 0.2)
            assert not level.armed or value <= level.median + 8.0 * level.spread
            level.accept(value)
        assert level.median == pytest.approx(math.log(20.0), abs=0.25)

    @given(st.integers(2, 20), st.floats(0.0, 1.0))
    def test_a_shift_is_believed_at_patience_and_not_before(self, patience: int, width: float) -> None:
        level = Level(patience=patience)
        for _ in range(40):
            level.accept(0.0)
        shifted = [100.0 + width * (i % 2) for i in range(patience)]
        for value in shifted[:-1]:
            assert not level.reject(value, agreement=1.0)
            assert level.median == 0.0
        assert level.reject(shifted[-1], agreement=1.0)
        assert level.armed
        assert level.median in shifted
        assert level.rejected_in_a_row == 0

    def test_outliers_that_disagree_or_are_interrupted_are_no_new_level(self) -> None:
        level = Level(patience=3)
        for _ in range(40):
            level.accept(0.0)
        assert not any(level.reject(value, agreement=1.0) for value in (100.0, 90.0, 100.0, 90.0, 100.0))
        for _ in range(5):
            level.accept(0.0)
            assert not level.reject(100.0, agreement=1.0)
            assert not level.reject(100.0, agreement=1.0)
        assert level.median == 0.0

    def test_only_the_last_outliers_have_to_agree(self) -> None:
        level = Level(patience=3)
        for _ in range(40):
            level.accept(0.0)
        assert [level.reject(v, agreement=1.0) for v in (500.0, 100.0, 100.0, 100.5)] == [False, False, False, True]


class TestCusum:
    # Eighths add up exactly, so the twin's sums are the same numbers.
    eighths = st.integers(-80, 80).map(lambda n: n / 8) | st.sampled_from([math.nan, math.inf, -math.inf])

    @given(st.lists(eighths, max_size=40))
    def test_does_what_its_slow_twin_does(self, values: list[float]) -> None:
        total = Cusum(slack=0.5, cap=4.0)
        for count, z in enumerate(values, 1):
            assert total.add(z) == total.value
            assert (total.value, total.since) == cusum(values[:count], slack=0.5, cap=4.0)

    @given(st.lists(eighths, max_size=40), st.integers(0, 40))
    def test_saved_anywhere_and_loaded_it_goes_on(self, values: list[float], cut: int) -> None:
        whole, second = Cusum(slack=0.5, cap=4.0), Cusum(slack=0.5, cap=4.0)
        for z in values[:cut]:
            whole.add(z)
        second.load_state_dict(json.loads(json.dumps(whole.state_dict(), allow_nan=False)))
        assert whole.since == second.since
        assert [whole.add(z) for z in values[cut:]] == [second.add(z) for z in values[cut:]]
        assert whole.since == second.since

    def test_one_wild_value_counts_no_more_than_the_cap(self) -> None:
        assert Cusum(slack=0.4, cap=4.0).add(1e300) == pytest.approx(3.6)

    @given(st.lists(st.floats(-1e6, 0.5), max_size=40))
    def test_is_one_sided(self, values: list[float]) -> None:
        """Values below the level never raise the sum, however many and however low."""
        total = Cusum(slack=0.5, cap=4.0)
        assert [total.add(z) for z in values] == [0.0] * len(values)


class TestWindow:
    @given(st.lists(finite, min_size=1, max_size=80), st.integers(1, 20), st.integers(0, 1000))
    def test_does_what_sorting_does(self, values: list[float], size: int, thousandths: int) -> None:
        window = Window(size)
        for count, value in enumerate(values, 1):
            window.push(value)
            kept = values[:count][-size:]
            assert window.values() == kept
            assert len(window) == len(kept)
            assert (window.smallest, window.largest) == (min(kept), max(kept))
            assert window.median == sorted(kept)[len(kept) // 2]
        share = thousandths / 1000
        assert window.quantile(share) in kept
        assert window.quantile(0.0) == min(kept)
        assert window.quantile(1.0) == max(kept)
        assert window.quantile(0.25) == at_share(kept, Fraction(1, 4))

    @given(st.lists(finite, max_size=40), st.integers(0, 40))
    def test_saved_anywhere_and_loaded_it_goes_on(self, values: list[float], cut: int) -> None:
        whole, second = Window(7, values[:cut]), Window(7, [1.0])
        second.load_state_dict(json.loads(json.dumps(whole.state_dict())))
        for value in values[cut:]:
            whole.push(value)
            second.push(value)
            assert (whole.values(), whole.median, whole.largest) == (second.values(), second.median, second.largest)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_what_is_not_finite_is_refused_and_changes_nothing(self, value: float) -> None:
        window = Window(2, [1.0, 2.0])
        with pytest.raises(ValueError, match="finite"):
            window.push(value)
        assert window.values() == [1.0, 2.0]
        window.clear()
        assert len(window) == 0
        window.push(5.0)
        assert window.median == 5.0


def tail_of(values: list[float]) -> Tail:
    tail = Tail(above=1.0)
    for value in values:
        tail.learn(value)
    return tail


class TestTail:
    logs = st.floats(-3.0, 8.0)

    @given(st.lists(logs, max_size=200))
    def test_does_what_its_slow_twin_does(self, values: list[float]) -> None:
        assert tail_of(values).limit == pytest.approx(tail_limit(values, above=1.0))

    @given(st.lists(logs, max_size=120), st.integers(0, 120))
    def test_saved_anywhere_and_loaded_it_goes_on(self, values: list[float], cut: int) -> None:
        whole, second = tail_of(values), Tail(above=1.0)
        second.learn(77.0)  # a used one forgets what it knew
        second.load_state_dict(json.loads(json.dumps(tail_of(values[:cut]).state_dict(), allow_nan=False)))
        for value in values[cut:]:
            second.learn(value)
        assert second.state_dict() == whole.state_dict()
        assert second.limit == whole.limit

    @given(st.lists(logs, max_size=60), st.integers(0, 59), st.floats(0.0, 5.0))
    def test_it_is_never_below_the_mark_and_further_outliers_never_lower_it(
        self, values: list[float], which: int, more: float
    ) -> None:
        limit = tail_of(values).limit
        assert limit >= 1.0
        if which < len(values) and values[which] > 1.0:
            values[which] += more
            assert tail_of(values).limit >= limit

    @given(st.integers(0, 10_000), st.floats(0.2, 1.5), st.floats(0.01, 0.2))
    def test_values_of_an_exponential_tail_hardly_ever_pass_it(self, seed: int, mean: float, rate: float) -> None:
        """And what is far beyond it does: one value in ten million is meant."""
        rng = random.Random(seed)
        tail, passed = Tail(above=1.0), 0
        for i in range(2000):
            value = 1.0 + rng.expovariate(1.0 / mean) if rng.random() < rate else 0.0
            passed += i > 500 and value > tail.limit > 1.0
            tail.learn(value)
        assert passed == 0
        assert tail.limit < 1.0 + 40.0 * mean

    def test_it_follows_a_run_whose_outliers_end(self) -> None:
        """By the last 64 of them; older ones are forgotten."""
        wild = [6.0] * 64
        assert tail_of([*wild, *[1.1] * 64]).limit == tail_of([*[2.0] * 64, *[1.1] * 64]).limit


@given(st.lists(finite, min_size=40, max_size=60))
def test_a_level_that_may_not_move_is_left_where_it_is(values: list[float]) -> None:
    level = Level(40)
    for value in values:
        level.accept(value)
    median = level.median
    told = [level.reject(1e9, agreement=1.0, moves=False) for _ in range(20)]
    assert told == [False] * 11 + [True] * 9
    assert level.median == median
