"""Would older weights do better? When that is asked, and what the answer weighs."""

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from steadystep.diagnosis import first_sign, needs_counterfactual, weigh
from steadystep.diagnosis.counterfactual import is_cleared, is_worse
from steadystep.diagnosis.explain import reach
from steadystep.records import Counterfactual, Damage, Finding, Severity, Signals

CALM = Signals(step=100, loss=2.0, grad_norm=1.0, lr=0.1)
SEVERITIES = st.sampled_from(["info", "warn", "act", "critical"])


def finding(detector: str, severity: Severity = "act", *, value: float = 3.0, **more: object) -> Finding:
    plain = {"detector": detector, "step": 100, "severity": severity, "value": value, "limit": 2.2, "baseline": 2.0}
    return Finding(**plain | more)


class TestWhenItIsAsked:
    def test_when(self) -> None:
        for found, refused, input_finite, asked in (
            (finding("weight-jump", "warn"), 0, None, False),
            (finding("not-healing"), 0, None, False),  # one batch is not enough
            (finding("slow-divergence", "info"), 0, None, False),
            (finding("worse-than-best"), 0, None, False),
            (finding("gradient-spike"), 5, None, False),
            (finding("non-finite", "critical"), 1, None, False),
            (finding("non-finite", "critical"), 2, None, True),
            (finding("non-finite", "critical"), 2, True, True),
            (finding("non-finite", "critical"), 2, False, False),  # the data is the cause
            (finding("non-finite", "info"), 9, None, False),  # a scaler's routine
        ):
            signals = replace(CALM, refused_in_a_row=refused, input_finite=input_finite)
            assert needs_counterfactual(signals, (found,)) is asked, found
            assert needs_counterfactual(signals, (finding("loss-spike", "info"), found)) is asked, found

    def test_weights_that_are_no_longer_finite_need_no_witness(self) -> None:
        stuck = replace(CALM, refused_in_a_row=2)
        nan = finding("non-finite", "critical")
        assert needs_counterfactual(stuck, (nan, finding("weight-jump", "warn")))
        assert not needs_counterfactual(stuck, (nan, finding("weight-jump", "act")))

    def test_a_loss_that_multiplies_in_the_first_steps_asks_at_once(self) -> None:
        assert needs_counterfactual(CALM, (finding("early-divergence", "act"),))
        assert not needs_counterfactual(CALM, (finding("early-divergence", "info"),))
        assert not needs_counterfactual(CALM, (finding("early-divergence", "act"), finding("weight-jump", "act")))

    def test_nothing_found_asks_nobody(self) -> None:
        assert not needs_counterfactual(replace(CALM, refused_in_a_row=9), ())

    def test_weights_must_be_older_than_the_first_sign(self) -> None:
        assert first_sign((finding("a", since=80), finding("b", since=90), finding("c"))) == 80
        assert first_sign((finding("c"),)) == 100


def heard(old_loss: float, current_loss: float, *, loss: float = 3.0) -> Signals:
    return replace(
        CALM, loss=loss, counterfactual=Counterfactual(step=50, old_loss=old_loss, current_loss=current_loss)
    )


class TestWhatItWeighs:
    @given(st.sampled_from(["weight-jump", "not-healing", "gradient-spike", "mine"]), SEVERITIES)
    def test_nobody_heard_changes_nothing(self, detector: str, severity: Severity) -> None:
        found = (finding(detector, severity),)
        assert weigh(CALM, found) == found

    @given(SEVERITIES)
    def test_older_weights_that_do_better_make_a_suspicion_a_case(self, severity: Severity) -> None:
        (found,) = weigh(heard(2.0, 3.0), (finding("weight-jump", severity),))
        assert found == finding("weight-jump", "act")

    @given(st.floats(0.0, 0.5))
    def test_older_weights_that_do_no_better_take_the_urgency_away(self, worse: float) -> None:
        (found,) = weigh(heard(2.0 + worse, 2.0), (finding("weight-jump"),))
        assert found.severity == "warn"

    def test_others_are_not_its_business(self) -> None:
        found = (finding("gradient-spike"), finding("non-finite", "critical"), finding("mine"), finding("not-healing"))
        assert weigh(heard(2.0, 2.0), found) == weigh(heard(2.0, 3.0), found) == found


class TestEarlyDivergence:
    """Undone where the batch is an ordinary one for the first weights, and not for the present ones."""

    def severity(self, old: float | None, now: float = 900.0, **more: object) -> str:
        plain = {"value": 900.0, "limit": 200.0, "baseline": 2.0}
        asked = None if old is None else Counterfactual(step=0, old_loss=old, current_loss=now)
        (found,) = weigh(replace(CALM, counterfactual=asked), (finding("early-divergence", **plain | more),))
        return found.severity

    def test_with_the_first_weights(self) -> None:
        for old, now, severity in (
            (2.0, 900.0, "act"),
            (20.0, 900.0, "act"),  # ordinary up to ten times the first loss
            (20.1, 900.0, "info"),
            (20.0, 200.0, "info"),  # and ten times as bad now
            (20.0, 200.1, "act"),
            (20.0, math.nan, "act"),
            (math.nan, 900.0, "info"),
            (math.inf, math.inf, "info"),
        ):
            assert self.severity(old, now) == severity, (old, now)
        assert self.severity(2.0, baseline=None) == "info"

    def test_without_them_only_what_is_beyond_all_measure(self) -> None:
        for value, limit, severity in (
            (2e6, 200.0, "info"),  # ten thousand times the limit
            (2.1e6, 200.0, "warn"),
            (1000.0, 0.01, "info"),
            (1001.0, 0.01, "warn"),
        ):
            assert self.severity(None, value=value, limit=limit) == severity, (value, limit)

    def test_what_asked_for_nothing_is_left_alone(self) -> None:
        for severity in ("info", "warn", "critical"):
            assert self.severity(2.0, severity=severity) == severity
            assert self.severity(None, severity=severity, value=1e15) == severity


def test_cleared_where_older_weights_do_no_better() -> None:
    assert not is_cleared(CALM)
    assert is_cleared(heard(2.0, 2.0))
    assert not is_cleared(heard(2.0, 3.0))


def test_what_is_worse() -> None:
    """A fiftieth is chance, and a batch that is not finite under older weights either is the data's fault."""
    for old_loss, current_loss, worse in (
        (2.0, 2.03, False),
        (2.0, 2.05, True),
        (30.0, 30.5, False),
        (30.0, 30.7, True),
        (-30.0, -29.5, False),
        (-30.0, -29.3, True),
        (2.0, 1.0, False),
        (2.0, math.nan, True),
        (2.0, math.inf, True),
        (math.nan, math.nan, False),
        (math.inf, math.inf, False),
        (math.nan, 2.0, False),
    ):
        assert is_worse(Counterfactual(step=50, old_loss=old_loss, current_loss=current_loss)) is worse, (
            old_loss,
            current_loss,
        )


class TestReach:
    def test_how_far(self) -> None:
        """Weights that jumped are damaged for certain; all else only where older ones were tried, and do better."""
        better, same = (
            Counterfactual(step=50, old_loss=1.0, current_loss=2.0),
            Counterfactual(step=50, old_loss=2.0, current_loss=2.0),
        )
        nan, poison, jump = finding("non-finite", "critical"), finding("poisoned-moments"), finding("weight-jump")
        for found, changes, expected in (
            ((jump,), {}, Damage.WEIGHTS),
            ((finding("odd-replica"),), {}, Damage.WEIGHTS),
            ((finding("early-divergence"),), {}, Damage.WEIGHTS),
            ((finding("early-divergence", "info"),), {}, Damage.NONE),
            ((finding("damaged-state"),), {}, Damage.MOMENTS),
            ((finding("damaged-state", "warn"),), {}, Damage.NONE),
            ((nan, finding("loss-spike", "warn")), {"refused_in_a_row": 2}, Damage.NONE),
            ((replace(jump, severity="warn"),), {}, Damage.NONE),
            ((finding("not-healing"),), {}, Damage.NONE),
            ((finding("slow-divergence"),), {}, Damage.NONE),
            ((finding("worse-than-best"),), {"counterfactual": better}, Damage.NONE),
            ((finding("not-healing", "warn"),), {"counterfactual": better}, Damage.NONE),
            ((finding("not-healing"),), {"counterfactual": better}, Damage.WEIGHTS),
            ((finding("slow-divergence"),), {"counterfactual": better}, Damage.WEIGHTS),
            ((finding("not-healing"),), {"counterfactual": same}, Damage.NONE),
            ((finding("not-healing"), poison), {"counterfactual": same}, Damage.MOMENTS),
            ((finding("not-healing"), poison), {"counterfactual": better}, Damage.WEIGHTS),
            ((jump, poison), {}, Damage.WEIGHTS),
            ((nan,), {"refused_in_a_row": 1, "counterfactual": better}, Damage.NONE),
            ((nan,), {"refused_in_a_row": 2, "counterfactual": better}, Damage.WEIGHTS),
            ((nan,), {"refused_in_a_row": 2}, Damage.NONE),  # nobody knows
            ((nan,), {"refused_in_a_row": 2, "input_finite": False, "counterfactual": better}, Damage.NONE),
            ((nan,), {"refused_in_a_row": 2, "counterfactual": same}, Damage.NONE),
            ((nan, replace(jump, severity="warn")), {"refused_in_a_row": 2}, Damage.WEIGHTS),
            ((nan, replace(jump, severity="warn")), {"refused_in_a_row": 1}, Damage.NONE),
            ((nan, replace(jump, severity="warn")), {"refused_in_a_row": 2, "counterfactual": same}, Damage.NONE),
            ((finding("non-finite", "info"),), {"refused_in_a_row": 9, "counterfactual": better}, Damage.NONE),
            ((finding("gradient-spike"),), {"refused_in_a_row": 9, "counterfactual": better}, Damage.NONE),
        ):
            assert reach(replace(CALM, **changes), found) is expected, (found, changes)
