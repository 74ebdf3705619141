"""The comparison of two sets of weights, batch by batch: each condition on both sides of its limit."""

import math
from dataclasses import replace
from typing import Any

from steadystep.diagnosis import RollbackTrial
from steadystep.diagnosis.counterfactual import as_closing, is_uncertain
from steadystep.records import Counterfactual, Finding, Severity, Signals


def suspicion(detector: str = "not-healing", severity: Severity = "act", **more: Any) -> Finding:
    """A loss that is usually 1 and has risen; 0.1 would be material."""
    plain = {"detector": detector, "step": 500, "severity": severity, "value": 1.5, "limit": 1.1, "baseline": 1.0}
    return Finding(**plain | more)


def trial(detector: str = "not-healing", **more: Any) -> RollbackTrial:
    made = RollbackTrial()
    assert made.begin(suspicion(detector, **more), state=300, lr=0.1)
    return made


def result(made: RollbackTrial, pairs: list[tuple[float, float]]) -> tuple[str, int]:
    """The verdict and the batches it took; the last pair is repeated."""
    for count in range(1, 100):
        old, now = pairs[min(count, len(pairs)) - 1]
        if (told := made.add(old_loss=old, current_loss=now)) != "gathering":
            return told, count
    raise AssertionError("no end")


def by(*gains: float, old: float = 0.0) -> list[tuple[float, float]]:
    """What the old weights do better by, batch for batch."""
    return [(old, old + gain) for gain in gains]


class TestConfirmed:
    def test_the_mean_must_be_four_standard_errors(self) -> None:
        """Gains of m + s and m - s in turns: the error of eight is s / sqrt(7)."""
        for mean, expected in ((1.55, ("confirmed", 8)), (1.48, ("confirmed", 10))):
            gains = [mean + (1.0 if i % 2 else -1.0) for i in range(24)]
            assert result(trial("weight-jump"), by(*gains, old=1.0)) == expected, mean

    def test_the_gap_must_last(self) -> None:
        assert result(trial(), by(*[2.0] * 4, *[1.4] * 4)) == ("confirmed", 8)
        assert result(trial(), by(*[2.0] * 4, *[1.39] * 4))[1] > 8
        assert result(trial("weight-jump"), by(*[2.0] * 4, *[1.0] * 4)) == ("confirmed", 8), "whatever it heals by"

    def test_a_gap_that_closes_too_slowly_lasts_where_nothing_is_lost_by_a_replay(self) -> None:
        """The loss rose by 0.5: at the end older weights must still undo half of that."""
        for last, replays, told in ((0.26, True, "confirmed"), (0.24, True, "healing"), (0.26, False, "healing")):
            made = RollbackTrial()
            made.begin(suspicion("slow-divergence"), state=300, lr=0.1, replays=replays)
            assert result(made, by(*[8.0] * 4, *[2.0] * 16, *[last] * 4, old=1.0)) == (told, 24), last

    def test_one_of_eight_batches_may_disagree(self) -> None:
        assert result(trial("weight-jump"), by(0.0, *[2.0] * 23)) == ("confirmed", 8)
        assert result(trial("weight-jump"), by(0.0, 0.0, *[2.0] * 23)) == ("confirmed", 16)
        assert result(trial("weight-jump"), by(0.0, 0.0, 0.0, *[2.0] * 23)) == ("confirmed", 24)

    def test_what_a_jump_must_give_back(self) -> None:
        """Half of what the loss rose by, and at least the margin."""
        for old, now, more, told in (
            (1.9, 3.0, {}, "confirmed"),  # 1.1 of 2
            (2.1, 3.0, {}, "cleared"),
            (1.0, 3.5, {"limit": 3.0}, "confirmed"),  # 2.5 against a margin of 2
            (1.6, 3.5, {"limit": 3.0}, "cleared"),
            (1.0, 1.2, {"baseline": None}, "confirmed"),  # the old loss in its place: 0.2 against 0.1
            (1.05, 1.09, {"baseline": None}, "cleared"),
        ):
            assert result(trial(**more), [(old, now)]) == (told, 8), (old, now, more)

    def test_a_slow_divergence_twice_its_margin(self) -> None:
        assert result(trial("slow-divergence"), [(1.0, 1.21)]) == ("confirmed", 8)
        assert result(trial("slow-divergence"), [(1.0, 1.19)]) == ("cleared", 8)

    def test_more_than_chance(self) -> None:
        assert result(trial("weight-jump"), [(1.0, 1.03)])[0] == "confirmed"
        assert result(trial("weight-jump"), [(1.0, 1.01)]) == ("cleared", 24)


class TestOverflows:
    def test_four_confirm_and_three_do_not(self) -> None:
        nan = [(1.0, math.nan)]
        assert result(trial(), nan * 4) == ("confirmed", 4)
        assert result(trial(), [(1.0, 1.0)] * 9 + [(1.0, math.inf)] * 2 + nan * 2)[0] == "cleared"
        assert result(trial(), nan * 3 + [(1.0, 3.0)]) == ("cleared", 24)

    def test_under_the_old_weights_it_is_the_data(self) -> None:
        assert result(trial(), [(1.0, 3.0), (math.inf, 3.0)]) == ("cleared", 2)


class TestUndecided:
    def test_cleared_early_where_two_errors_do_not_reach_what_is_needed(self) -> None:
        """A gain of 0.5 where 1 is needed, with a scatter of s: 0.5 + 0.756 s."""
        for scatter, early in ((0.6, True), (0.7, False)):
            pairs = [(2.5 + (scatter if i % 2 else -scatter), 3.0) for i in range(24)]
            assert (result(trial(), pairs)[1] == 8) is early, scatter

    def series(self, high: float, fall: float, scatter: float, **more: Any) -> tuple[str, int]:
        """12 batches at `high`, 12 lower by `fall`; the old weights do so differently that nothing is decided."""
        now = [high - (fall if i >= 12 else 0.0) + (scatter if i % 2 else -scatter) for i in range(24)]
        return result(trial(**more), [(loss - (3.0 if i % 2 else -2.0), loss) for i, loss in enumerate(now)])

    def test_a_loss_on_its_way_back_is_healing(self) -> None:
        for high, fall, scatter, told in (
            (2.0, 0.31, 0.01, "healing"),  # 0.7 of what it was above its baseline
            (2.0, 0.29, 0.01, "cleared"),
            (2.0, 0.8, 0.5, "healing"),  # 1.2 sigma of the losses
            (2.0, 0.7, 0.5, "cleared"),
            (2.0, -0.8, 0.01, "cleared"),
        ):
            assert self.series(high, fall, scatter) == (told, 24), (high, fall, scatter)
        assert self.series(2.0, 0.31, 0.01, baseline=None) == ("cleared", 24), "on its way to what?"

    def test_a_trend_takes_16_batches(self) -> None:
        falling = [3.0 - 0.1 * i for i in range(24)]
        assert result(trial(), [(loss, loss) for loss in falling]) == ("cleared", 8)
        # why: one gain among zeros has an error as large as the mean, so the larger it is the longer it takes
        for gain, expected in ((3.2, ("cleared", 15)), (3.3, ("healing", 16))):
            pairs = [(falling[0] - gain, falling[0]), *((loss, loss) for loss in falling[1:])]
            assert result(trial(), pairs) == expected, gain


class TestBook:
    def test_means_over_the_batches(self) -> None:
        made = trial()
        for old, now in ((1.0, 4.0), (2.0, 8.0)):
            made.add(old_loss=old, current_loss=now)
        found = made.counterfactual
        assert (found.step, found.old_loss, found.current_loss, found.lr, found.batches) == (300, 1.5, 6.0, 0.1, 2)
        assert math.isnan(trial().counterfactual.old_loss)

    def test_32_quiet_steps_after_one_came_to_nothing(self) -> None:
        made = trial()
        assert made.close(520).step == 520
        assert made.finding is None
        assert not made.begin(suspicion(step=551), state=1, lr=0.1)
        assert made.finding is None
        assert made.begin(suspicion(step=552), state=1, lr=0.1)
        assert (made.state, made.counterfactual.batches) == (1, 0)

    def test_a_warning_every_400_steps(self) -> None:
        made = RollbackTrial()
        told = [made.once(suspicion(severity="warn", step=step)).severity for step in (100, 499, 500, 899, 900)]
        assert told == ["warn", "info", "warn", "info", "warn"]
        assert made.once(suspicion(severity="act", step=901)).severity == "act"

    def test_the_gravest_severity_is_kept(self) -> None:
        for before, after, kept in (
            ("warn", "warn", "warn"),
            ("warn", "act", "act"),
            ("act", "warn", "act"),
            ("info", "warn", "warn"),
        ):
            made = trial(severity=before)
            made.heard(suspicion(severity=after, value=9.0))
            assert made.finding is not None
            assert (made.finding.severity, made.finding.value) == (kept, 9.0)
            made.heard(suspicion("worse-than-best", value=7.0))
            assert made.finding.value == 9.0
        closed = RollbackTrial()
        closed.heard(suspicion())
        assert closed.finding is None

    def test_saved_and_loaded(self) -> None:
        made = trial()
        made.once(suspicion(severity="warn", step=700))
        made.close(520)
        assert made.state_dict() == {"quiet_until": 552, "told_until": 1100}
        again = trial()
        again.load_state_dict(made.state_dict())
        assert again.finding is None
        assert again.state_dict() == made.state_dict()
        assert RollbackTrial().begin(suspicion(step=0), state=0, lr=0.1), "nothing is quiet at first"
        assert RollbackTrial().once(suspicion(severity="warn", step=0)).severity == "warn"


class TestSilent:
    def test_a_loss_that_has_doubled_is_tried_where_it_can_be_replayed(self) -> None:
        note = suspicion("slow-divergence", "info", value=2.1)
        made = RollbackTrial()
        assert made.candidates((), (note,), replays=True) == (note,)
        assert not made.candidates((), (note,), replays=False)
        assert not made.candidates((), (suspicion("slow-divergence", "info", value=1.9),), replays=True)
        assert not made.candidates((), (suspicion("not-healing", "info", value=2.1),), replays=True)
        loud = suspicion("weight-jump", "warn")
        assert made.candidates((loud,), (note, loud), replays=True) == (loud,)

    def test_it_keeps_no_warning_waiting(self) -> None:
        note, loud = suspicion("slow-divergence", "info", value=2.1), suspicion("weight-jump", "warn", step=501)
        made = RollbackTrial()
        assert made.begin(note, state=300, lr=0.1, replays=True)
        made.candidates((loud,), (loud,), replays=True)
        assert made.finding is None
        assert not made.begin(suspicion("slow-divergence", "info", value=2.1, step=510), state=300, lr=0.1)
        assert made.begin(loud, state=300, lr=0.1)
        made.close(502)
        assert not made.begin(suspicion("weight-jump", "warn", step=510), state=300, lr=0.1), "as before"

    def test_a_warning_of_the_same_kind_goes_on_with_it(self) -> None:
        made = RollbackTrial()
        made.begin(suspicion("slow-divergence", "info", value=2.1), state=300, lr=0.1, replays=True)
        loud = suspicion("slow-divergence", "act")
        made.candidates((loud,), (loud,), replays=True)
        made.heard(loud)
        assert made.finding is not None
        assert made.finding.severity == "act"


def test_a_replay_as_a_test_is_made_once_in_500_steps() -> None:
    trial = RollbackTrial()
    assert [step for step in range(0, 1200, 100) if trial.may_replay(step)] == [0, 500, 1000]


class TestBadBatches:
    """A rise that bad batches made: what is high under any weights is put aside until good ones come."""

    def begun(self, detector: str = "not-healing", *, replays: bool = True, **more: Any) -> RollbackTrial:
        made = RollbackTrial()
        made.begin(suspicion(detector, **more), state=300, lr=0.1, replays=replays)
        return made

    def test_a_batch_is_put_aside_where_the_old_weights_share_more_than_half_of_its_rise(self) -> None:
        for old, now, aside in (
            (2.01, 3.0, True),
            (2.0, 3.0, False),
            (1.11, 1.15, True),
            (1.1, 1.15, False),  # the limit
            (math.inf, 3.0, False),
        ):
            made = self.begun()
            made.add(old_loss=old, current_loss=now)
            assert (made.counterfactual.batches == 0) is aside, (old, now)

    def test_what_puts_no_batch_aside(self) -> None:
        for made in (
            self.begun(replays=False),
            self.begun("weight-jump"),
            self.begun("worse-than-best"),
            self.begun(baseline=None),
        ):
            made.add(old_loss=2.9, current_loss=3.0)
            assert made.counterfactual.batches == 1
        good_first = self.begun("slow-divergence")
        good_first.add(old_loss=1.0, current_loss=1.0)
        good_first.add(old_loss=2.9, current_loss=3.0)
        assert good_first.counterfactual.batches == 2

    def test_three_in_a_row_make_it_the_data_and_24_are_too_many(self) -> None:
        made = self.begun("slow-divergence")
        seen = [(made.add(old_loss=2.9, current_loss=3.0), made.is_of_data) for _ in range(24)]
        assert seen == [("gathering", count >= 3) for count in range(1, 24)] + [("cleared", True)]

    def test_the_same_batch_again_and_again_is_of_the_data_too(self) -> None:
        assert self.begun("same-batch").is_of_data
        assert not self.begun("same-batch", replays=False).is_of_data
        assert not self.begun("weight-jump").is_of_data
        assert not RollbackTrial().is_of_data

    def test_after_bad_batches_any_loss_that_is_the_worse_for_them_is_enough(self) -> None:
        bad = [(2.9, 3.0)]
        assert result(self.begun(), bad * 3 + [(1.0, 1.03)]) == ("confirmed", 11)
        assert result(self.begun(), bad * 2 + [(1.0, 1.03)]) == ("cleared", 10)
        assert result(self.begun(), bad * 3 + by(*[2.0] * 4, *[1.0] * 4, old=1.0)) == ("confirmed", 11)
        assert result(self.begun(), bad * 3 + [(1.0, 1.0)])[0] == "cleared"

    def test_a_new_trial_begins_without_them(self) -> None:
        made = self.begun()
        for _ in range(3):
            made.add(old_loss=2.9, current_loss=3.0)
        made.close(500)
        made.begin(suspicion(step=600), state=590, lr=0.1, replays=True)
        assert not made.is_of_data
        assert (made.counterfactual.step, made.state) == (590, 590)


def test_what_only_a_comparison_can_confirm() -> None:
    for detector, severity, uncertain in (
        ("weight-jump", "act", False),  # the weight is no longer finite
        ("weight-jump", "warn", True),
        ("same-batch", "warn", False),
        ("same-batch", "act", True),
        ("not-healing", "act", True),
        ("slow-divergence", "info", True),
        ("worse-than-best", "warn", True),
        ("gradient-spike", "act", False),
    ):
        assert is_uncertain(suspicion(detector, severity)) is uncertain, (detector, severity)


def test_a_comparison_that_is_only_reason_for_a_replay_says_so() -> None:
    tried = Counterfactual(step=3, old_loss=1.0, current_loss=2.0)
    signals = Signals(step=9, loss=2.0, grad_norm=1.0, counterfactual=tried)
    assert as_closing(signals) == replace(signals, counterfactual=replace(tried, closing=True))


def test_a_note_about_a_loss_is_tried_from_twice_its_baseline_on() -> None:
    def tried(**more: Any) -> bool:
        note = suspicion("slow-divergence", "info", **more)
        return bool(RollbackTrial().candidates((), (note,), replays=True))

    assert [tried(value=value) for value in (2.0, 2.01)] == [False, True]
    assert not tried(value=9.0, baseline=None)
    assert not tried(value=9.0, baseline=-1.0)
