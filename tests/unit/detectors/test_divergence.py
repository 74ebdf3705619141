"""Losses that multiply at once, or were better once, and warm-ups that were short: where exactly."""

import math
from collections.abc import Callable

import pytest

from steadystep.detectors import ShortWarmup, WorseThanBest
from steadystep.detectors.divergence import EarlyDivergence
from steadystep.records import Finding
from tests.unit.detectors.feeding import fed, rows, said


def early(*losses: float) -> list[Finding]:
    return fed(EarlyDivergence, rows(loss=list(losses)))


class TestEarlyDivergence:
    def test_the_second_in_a_row_asks_for_action(self) -> None:
        found = early(1.0, 100.0, 100.1, 101.0, 102.0)
        assert said(found) == [(2, "info"), (3, "act"), (4, "info")]
        assert [(f.value, f.limit, f.baseline, f.since) for f in found[:1]] == [(100.1, 100.0, 1.0, 1)]
        assert said(early(1.0, 101.0, 50.0, 101.0)) == [(1, "info"), (3, "info")]
        assert said(early(1.0, math.nan, 101.0, math.inf, 101.0)) == [(2, "info"), (4, "act")]

    def test_ten_thousand_times_is_enough_at_once(self) -> None:
        assert said(early(2.0, 20000.0)) == [(1, "info")]
        assert said(early(2.0, 20001.0)) == [(1, "act")]

    def test_it_asks_once_more_at_the_eighth(self) -> None:
        assert [step for step, severity in said(early(1.0, *[101.0] * 12)) if severity == "act"] == [2, 8]
        broken = early(1.0, *[101.0] * 3, 1.0, *[101.0] * 8)
        assert [step for step, severity in said(broken) if severity == "act"] == [2, 12]

    def test_it_began_when_the_loss_had_tripled(self) -> None:
        assert [f.since for f in early(1.0, 3.0, 3.1, 50.0, 101.0)] == [2]
        assert [f.since for f in early(1.0, 4.0, 3.0, 4.0, 101.0)] == [3]

    def test_only_in_the_first_64_losses(self) -> None:
        assert said(early(*[1.0] * 62, *[101.0] * 5)) == [(62, "info"), (63, "act")]
        assert said(early(*[1.0] * 31, *[math.nan] * 9, *[1.0] * 32, *[101.0] * 5)) == [(72, "info")]

    def test_a_first_loss_that_is_not_positive_is_no_measure(self) -> None:
        assert early(0.0, 1e6, 1e6) == []
        assert early(-1.0, 1e6, 1e6) == []
        assert early(-1.0, -200.0, -300.0) == []
        assert early(math.nan, 1.0, 101.0) != []


def window(level: float, noise: float = 0.0) -> list[float]:
    """64 losses whose median is `level`; the tenth from below and from above are `noise` away, those beyond further."""
    low, high = [level - 5 * noise] * 9 + [level - noise], [level + noise] + [level + 5 * noise] * 9
    return [*low, *[level] * 44, *high]


def worse(*windows: list[float], lrs: list[float] | float = 0.1) -> list[Finding]:
    rates = lrs if isinstance(lrs, float) else [lr for lr in lrs for _ in range(64)]
    return fed(WorseThanBest, rows(loss=[loss for each in windows for loss in each], lr=rates))


class TestWorseThanBest:
    @pytest.mark.parametrize(
        ("first", "best", "noise", "margin"),
        [
            (20.0, 20.0, 0.75, 0.75),  # the noise of single losses
            (100.0, 100.0, 0.0, 3.0),  # a part of the best
            (101.0, 1.0, 0.0, 3.0),  # a part of the progress
        ],
    )
    @pytest.mark.parametrize("beyond", [False, True])
    def test_three_windows_beyond_the_margin(
        self, first: float, best: float, noise: float, margin: float, beyond: bool
    ) -> None:
        level = best + margin + (0.125 if beyond else 0.0)
        found = worse(window(first), window(best), *[window(level, noise)] * 3)
        assert [(f.step, f.severity, f.value, f.limit, f.baseline, f.since) for f in found] == (
            [(319, "warn", level, best + margin, best, 127)] if beyond else []
        )

    def test_in_a_row(self) -> None:
        up, best = window(2.0), window(1.0)
        assert worse(best, up, up, best, up, up) == []
        assert worse(best, up, up, window(1.01), up, up) == []
        assert [f.step for f in worse(best, up, up, not_finite_but_one(), up)] == [275]

    def test_from_then_on_the_present_level_counts(self) -> None:
        found = worse(window(1.0), *[window(2.0)] * 6, *[window(3.0)] * 3)
        assert [(f.step, f.baseline, f.since) for f in found] == [(255, 1.0, 63), (639, 2.0, 447)]

    @pytest.mark.parametrize(("lowest", "quiet"), [(-0.1, 8), (0.0, 0)])
    def test_after_a_negative_loss_its_level_says_nothing_for_eight_windows(self, lowest: float, quiet: int) -> None:
        found = worse([lowest, *window(1.0)[1:]], *[window(2.0)] * 12)
        first = 64 * max(quiet, 1)  # the first window that counts
        assert found[0].step == first + 3 * 64 - 1

    def test_after_a_planned_rise_it_begins_anew(self) -> None:
        low, high = window(1.0), window(2.0)
        assert worse(high, low, high, high, high, lrs=[1.0, 0.1, 0.1, 0.1, 0.1]) != []
        assert worse(high, low, high, high, high, lrs=[1.0, 0.1, 0.9, 0.9, 0.9]) == []
        cut = fed(
            WorseThanBest,
            rows(loss=[*high, *low, *low[:30], *high * 4], lr=[*[1.0] * 64, *[0.1] * 94, *[0.9] * 256]),
        )
        assert cut == []


def not_finite_but_one() -> list[float]:
    return [math.nan, math.inf] * 10 + [2.0]


def warmup(beta2: float, *rates: float) -> list[Finding]:
    make: Callable[[], ShortWarmup] = lambda: ShortWarmup(beta2=beta2)  # noqa: E731
    return fed(make, rows(lr=list(rates)))


class TestShortWarmup:
    def test_once_when_the_rate_has_stopped_rising(self) -> None:
        found = warmup(0.75, 1.0, 2.0, 3.0, 3.0, 9.0, 9.0)
        assert [(f.step, f.severity, f.value, f.limit) for f in found] == [(3, "info", 2.0, 8.0)]
        assert [f.value for f in warmup(0.75, 1.0, 2.0, 1.0)] == [1.0]
        assert [f.step for f in warmup(0.75, math.nan, 0.0, math.inf, 1.0, -1.0, 1.0)] == [5]

    @pytest.mark.parametrize(
        "rates",
        [
            (1.0, 1.99, 1.99),  # no warm-up
            (1.0, 1.0),
            (0.0, 0.0),
            (2.0, 1.0, 4.0, 4.0),
            (1.0, 2.0, 3.0),  # not over yet
        ],
    )
    def test_what_is_none(self, rates: tuple[float, ...]) -> None:
        assert warmup(0.75, *rates) == []

    @pytest.mark.parametrize(("rises", "told"), [(6, True), (7, False), (9, False)])
    def test_long_enough_for_the_second_moment(self, rises: int, told: bool) -> None:
        rates = [float(i) for i in range(1, rises + 2)]
        assert bool(warmup(0.75, *rates, rates[-1])) == told
