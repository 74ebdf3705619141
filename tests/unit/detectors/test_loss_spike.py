"""One loss far above the others, and losses that stay up: where exactly."""

import math
from typing import Any

import pytest

from steadystep.detectors import LossSpike, NotHealing
from steadystep.records import Finding
from tests.unit.detectors.feeding import fed, rows, said

CALM = [1.0, 1.25, 1.0] * 10
"""Median 1, one sigma upwards 0.25."""


def spikes(*losses: float, **more: Any) -> list[Finding]:
    return fed(LossSpike, rows(loss=list(losses), **more))


class TestLossSpike:
    @pytest.mark.parametrize(("loss", "told"), [(3.0, False), (3.1, True), (-9.0, False), (math.inf, False)])
    def test_eight_sigma_above_the_median(self, loss: float, told: bool) -> None:
        found = spikes(*CALM, loss)
        assert [(f.step, f.severity, f.value, f.limit, f.baseline) for f in found] == (
            [(30, "info", loss, 3.0, 1.0)] if told else []
        )

    def test_as_many_as_asked_for(self) -> None:
        for loss, told in ((2.0, False), (2.1, True)):
            assert bool(fed(lambda: LossSpike(deviations=4.0), rows(loss=[*CALM, loss]))) == told

    @pytest.mark.parametrize(("loss", "told"), [(2.0625, False), (2.07, True)])
    def test_differences_that_are_rounding_are_none(self, loss: float, told: bool) -> None:
        assert bool(spikes(*[2.0] * 30, loss, loss_eps=2.0**-10)) == told
        assert bool(spikes(*[-2.0] * 30, loss - 4.0, loss_eps=2.0**-10)) == told

    @pytest.mark.parametrize(("before", "told"), [(23, False), (24, True)])
    def test_24_losses_come_first(self, before: int, told: bool) -> None:
        assert bool(spikes(*[1.0] * before, 9.0)) == told

    def test_twelve_that_agree_are_the_new_level(self) -> None:
        assert [f.step for f in spikes(*CALM, *[9.0] * 15)] == list(range(30, 41))
        assert len(spikes(*CALM, *[9.0, 11.1] * 8)) == 16
        assert len(spikes(*CALM, *[9.0, 11.0] * 8)) == 11

    def test_spikes_are_not_learned(self) -> None:
        assert len(spikes(*CALM, *[99.0, 1.0] * 20)) == 20


def raised(*losses: float, start: float = 2.0, **more: Any) -> list[Finding]:
    """After a first loss and forty at 1: all that was learned is `start - 1`."""
    return fed(NotHealing, rows(loss=[start, *[1.0] * 40, *losses], **more))


BEGAN = 41


class TestNotHealing:
    def test_a_note_at_the_sixth_in_a_row(self) -> None:
        found = raised(*[1.2] * 10)
        assert [(f.step, f.severity, f.value, f.baseline, f.since) for f in found] == [
            (BEGAN + 5, "info", 1.2, 1.0, BEGAN)
        ]
        assert found[0].limit == pytest.approx(1.02)

    @pytest.mark.parametrize(
        ("start", "level", "noted"),
        [
            (1.5, 1.019, False),  # less than 2 % of the loss
            (1.5, 1.021, True),
            (6.0, 1.099, False),  # less than 2 % of what was learned
            (6.0, 1.101, True),
            (0.5, 1.021, True),
        ],
    )
    def test_an_amount_that_matters(self, start: float, level: float, noted: bool) -> None:
        assert bool(raised(*[level] * 8, start=start)) == noted

    def test_the_noise_of_this_run_and_of_its_numbers(self) -> None:
        noisy = [2.0, *CALM]
        assert fed(NotHealing, rows(loss=[*noisy, *[2.9] * 8])) == []
        assert fed(NotHealing, rows(loss=[*noisy, *[3.1] * 8])) != []
        assert fed(lambda: NotHealing(deviations=4.0), rows(loss=[*noisy, *[2.1] * 8])) != []
        assert fed(lambda: NotHealing(deviations=4.0), rows(loss=[*noisy, *[1.9] * 8])) == []
        assert raised(*[1.3] * 8, loss_eps=0.01) == []  # 1 + 8 * 4 * 0.01
        assert raised(*[1.33] * 8, loss_eps=0.01) != []

    @pytest.mark.parametrize(
        ("level", "at", "severity"),
        [
            (1.2, 36, "warn"),
            (1.25, 36, "act"),  # a quarter of what was learned
            (1.4375, 36, "act"),
            (1.5, 18, "act"),  # half of it
            (3.0, 18, "act"),
        ],
    )
    def test_a_warning_when_it_lasts(self, level: float, at: int, severity: str) -> None:
        found = raised(*[level] * 60)
        assert said(found) == [(BEGAN + 5, "info"), (BEGAN + at - 1, severity)]
        assert {finding.since for finding in found} == {BEGAN}

    def test_losses_in_between_that_were_not_raised_count_down(self) -> None:
        assert said(raised(*[1.2] * 5, 1.0, *[1.2] * 2)) == [(BEGAN + 7, "info")]
        assert said(raised(*[1.2] * 3, *[1.0] * 3, *[1.2] * 6)) == [(BEGAN + 11, "info")]
        assert [f.since for f in raised(*[1.2] * 3, *[1.0] * 3, *[1.2] * 6)] == [BEGAN + 6]
        assert [f.since for f in raised(*[1.2] * 3, *[1.0] * 2, *[1.2] * 6)] == [BEGAN]

    def test_losses_that_are_not_finite_do_not_count(self) -> None:
        assert said(raised(*[1.2, math.nan, math.inf] * 6)) == [(BEGAN + 15, "info")]

    @pytest.mark.parametrize(("last", "warned"), [(1.30, False), (1.36, True)])
    def test_not_where_it_comes_down_again(self, last: float, warned: bool) -> None:
        """Less than 0.7 of where it began, which is 1.5."""
        found = raised(*[1.5] * 6, *[1.45] * 6, *[last] * 40)
        assert [f.severity for f in found if f.severity != "info"] == (["act"] if warned else [])

    def test_twice_the_longest_stretch_that_healed_by_itself(self) -> None:
        def stretches(*lengths: int) -> list[float]:
            return [loss for count in lengths for loss in [*[1.6] * count, *[1.0] * (count + 30)]]

        assert [f.step for f in raised(*stretches(10), *[1.6] * 40) if f.severity == "act"] == [BEGAN + 50 + 19]
        assert [f.step for f in raised(*stretches(8), *[1.6] * 40) if f.severity == "act"] == [BEGAN + 46 + 17]
        assert [f.step for f in raised(*stretches(10, 7), *[1.6] * 40) if f.severity == "act"] == [BEGAN + 50 + 44 + 19]

    @pytest.mark.parametrize(("ago", "warned"), [(109, False), (111, True)])
    def test_not_within_128_losses_of_a_negative_one(self, ago: int, warned: bool) -> None:
        losses = [2.0, *[1.0] * 40, -0.1, *[1.0] * ago, *[1.6] * 18]
        found = fed(NotHealing, rows(loss=losses))
        assert [f.severity for f in found] == (["info", "act"] if warned else ["info"])

    def test_64_that_agree_are_the_new_level(self) -> None:
        assert said(raised(*[1.2] * 64, *[1.4] * 6)) == [
            (BEGAN + 5, "info"),
            (BEGAN + 35, "warn"),
            (BEGAN + 64 + 5, "info"),
        ]

    def test_after_a_planned_rise_it_begins_anew(self) -> None:
        rates = [1.0, *[0.1] * 40, *[0.9] * 40]
        assert raised(*[1.6] * 40, lr=rates) == []
        assert raised(*[1.6] * 40, lr=0.1) != []
