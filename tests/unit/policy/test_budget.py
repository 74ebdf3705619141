"""What was done before, in its windows; and when a run is over."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadystep.errors import TrainingHalted
from steadystep.policy import Budget, EarlyStopping
from steadystep.records import ActionName, Damage, Diagnosis, Outcome, Plan, Quarantined
from tests.unit.policy.test_trusted_snapshots import sign


def took(budget: Budget, step: int) -> None:
    budget.count(Outcome(step=step, reading=1.0, stepped=True))


def refused(budget: Budget, step: int, action: ActionName = "skip-step") -> None:
    budget.count(Outcome(step=step, reading=1.0, stepped=False, plan=Plan(actions=(action,))))


def rolled_back(budget: Budget, at: int, to: int | None = 0, restored: int | None = 1) -> None:
    plan = Plan(actions=("rollback",), to=to)
    budget.count(Outcome(step=at, reading=1.0, stepped=False, plan=plan, restored=restored))


class TestSkips:
    def test_in_a_row(self) -> None:
        budget = Budget(max_skips_in_a_row=3)
        spent = []
        for step in range(3):
            spent.append(budget.skips_spent(step))
            refused(budget, step)
        assert spent == [False, False, True]
        assert budget.skips_in_a_row == budget.refused_in_a_row == 3
        took(budget, 3)
        assert budget.skips_in_a_row == budget.refused_in_a_row == 0
        assert not budget.skips_spent(4)

    def test_overflows_of_a_loss_scaler_are_its_routine(self) -> None:
        budget = Budget()
        refused(budget, 0, "back-off-scale")
        refused(budget, 1)
        refused(budget, 2, "back-off-scale")
        assert (budget.skips_in_a_row, budget.refused_in_a_row) == (3, 1)

    def test_within_two_hundred_attempts(self) -> None:
        budget = Budget(max_skips=3)
        for step in (300, 320):
            refused(budget, step)
            took(budget, step + 1)
        assert [budget.skips_spent(step) for step in (499, 500)] == [True, False]
        refused(budget, 510)
        assert [budget.skips_spent(step) for step in (519, 520)] == [True, False]

    def test_a_rollback_begins_anew_in_a_row(self) -> None:
        budget = Budget()
        refused(budget, 5)
        rolled_back(budget, 6)
        assert budget.skips_in_a_row == budget.refused_in_a_row == 0

    def test_a_rollback_that_was_not_carried_out_is_a_refusal(self) -> None:
        for to, restored in ((None, 1), (4, None), (None, None)):
            budget = Budget()
            rolled_back(budget, 6, to=to, restored=restored)
            assert budget.skips_in_a_row == 1
            assert budget.last_target(7) is None
            assert budget.rollbacks_left(7) == 3


class TestRollbacks:
    def test_within_a_thousand_attempts(self) -> None:
        budget = Budget(max_rollbacks=2)
        rolled_back(budget, 100)
        assert (budget.rollbacks_left(100), budget.rollbacks_spent(100)) == (1, False)
        rolled_back(budget, 600)
        assert [budget.rollbacks_left(step) for step in (600, 1099, 1100, 1599, 1600)] == [0, 0, 1, 1, 2]
        assert [budget.rollbacks_spent(step) for step in (600, 1099, 1100)] == [True, True, False]

    @pytest.mark.parametrize("most", [0, 1, 20, 25, 60])
    def test_a_large_budget_is_spent_too(self, most: int) -> None:
        budget = Budget(max_rollbacks=most)
        for step in range(most):
            assert not budget.rollbacks_spent(step)
            rolled_back(budget, step)
        assert budget.rollbacks_spent(most)
        assert budget.rollbacks_left(most) == 0

    def test_what_has_left_the_window_is_not_kept(self) -> None:
        budget = Budget()
        for step in range(0, 50_000, 500):
            rolled_back(budget, step)
            refused(budget, step + 1)
        assert len(budget.state_dict()["rollbacks"]) == 2
        assert len(budget.state_dict()["skips"]) == 1

    def test_where_the_last_one_went_if_it_was_soon(self) -> None:
        budget = Budget()
        assert budget.last_target(0) is None
        rolled_back(budget, 100, to=60)
        rolled_back(budget, 200, to=-1)
        assert [budget.last_target(step) for step in (201, 699, 700)] == [-1, -1, None]


def test_exceptions_are_counted_for_a_thousand_steps() -> None:
    budget = Budget()
    assert [budget.raised(step) for step in (0, 5, 999, 1000, 1004, 1005, 9000)] == [1, 2, 3, 3, 4, 4, 1]


def test_it_goes_on_where_it_was_saved() -> None:
    budget = Budget()
    budget.see(Diagnosis(findings=sign(5, severity="warn")))
    rolled_back(budget, 10, to=4)
    refused(budget, 11)
    refused(budget, 12, "back-off-scale")
    budget.raised(13)
    budget.see(Diagnosis(findings=sign(14)))
    saved = json.loads(json.dumps(budget.state_dict()))
    other = Budget()
    other.load_state_dict(saved)
    assert other.state_dict() == saved
    assert (other.skips_in_a_row, other.refused_in_a_row) == (2, 1)
    assert (other.last_target(20), other.rollbacks_left(20), other.raised(20)) == (4, 2, 2)
    assert other.episode.first_sign == 14
    del saved["raised"]  # an older state
    other.load_state_dict(saved)
    assert other.raised(20) == 1


class TestHalt:
    def halted(self, budget: Budget, **more: object) -> TrainingHalted:
        diagnosis = Diagnosis(cause="a-cause", evidence="the evidence", advice="the advice", damage=Damage.NONE)
        values = {"step": 2000, "reading": 1.0, "stepped": False, "diagnosis": diagnosis}
        return budget.halt(Outcome(**values | more))

    def test_what_it_is_about(self) -> None:
        error = self.halted(Budget())
        assert (error.step, error.try_next) == (2000, "the advice")
        assert "the evidence" in error.what
        assert "a-cause" in error.what
        assert not any(letter.isdigit() for letter in error.did)

    def test_how_many_were_refused(self) -> None:
        budget = Budget()
        refused(budget, 1998)
        assert not any(letter.isdigit() for letter in self.halted(budget).did)  # one is no row
        refused(budget, 1999)
        assert "2" in self.halted(budget).did

    def test_rollbacks_of_this_window(self) -> None:
        budget = Budget()
        for at, to in ((1000, 871), (1001, 872), (1900, 873)):
            rolled_back(budget, at, to=to)
        did = self.halted(budget).did
        assert "871" not in did
        assert did.index("872") < did.index("873") < did.index("skipped")

    def test_which_weights_are_in_place(self) -> None:
        plan = Plan(actions=("rollback", "stop"), to=321)
        assert "321" in self.halted(Budget(), plan=plan, restored=322).did
        assert "321" not in self.halted(Budget(), plan=plan).did
        usual = self.halted(Budget()).did
        assert self.halted(Budget(), restored=322).did == usual
        assert self.halted(Budget(), diagnosis=Diagnosis(damage=Damage.MOMENTS)).did == usual
        broken = self.halted(Budget(), diagnosis=Diagnosis(damage=Damage.WEIGHTS)).did
        assert "own checkpoints" in broken
        assert "own checkpoints" not in usual

    def test_where_it_began_and_what_there_is_to_run_again(self) -> None:
        error = self.halted(Budget(), origin="layers.3", incident="runs/a/incident-7")
        assert "layers.3" in error.what
        assert "runs/a/incident-7" in error.did
        assert len(error.what) > len(self.halted(Budget()).what)


class TestEarlyStopping:
    @given(st.lists(st.floats() | st.sampled_from([1.0, 2.0]), max_size=20), st.integers(1, 5))
    def test_against_the_whole_list(self, losses: list[float], patience: int) -> None:
        early = EarlyStopping(patience=patience)
        assert early.wanted
        best, since = math.inf, 0
        for loss in losses:
            better = math.isfinite(loss) and loss < best
            best, since = (loss, 0) if better else (best, since + 1)
            assert early.update(loss) is better
            assert (early.best, early.since_best) == (best, since)
            assert early.should_stop is (since >= patience)
        saved = json.loads(json.dumps(early.state_dict(), allow_nan=False))
        other = EarlyStopping(patience=patience)
        other.load_state_dict(saved)
        assert (other.best, other.since_best) == (best, since)

    def test_never_without_a_patience(self) -> None:
        early = EarlyStopping(patience=None)
        for _ in range(50):
            early.update(1.0)
        assert not early.wanted
        assert not early.should_stop


def test_batches_set_aside_are_listed_up_to_a_thousand() -> None:
    budget, again = Budget(), Budget()
    for step in range(1002):
        batch = Quarantined(step=step, cause="bad-batch", epoch=1, batches=(step,))
        budget.count(Outcome(step=step, reading=1.0, stepped=True, quarantined=(batch,)))
    assert [budget.quarantined[i].step for i in (0, -1)] == [2, 1001]
    assert len(budget.quarantined) == 1000
    again.load_state_dict(json.loads(json.dumps(budget.state_dict())))
    assert again.quarantined == budget.quarantined


def test_exceptions_of_a_thousand_steps_are_counted() -> None:
    budget = Budget()
    assert [budget.raised(step) for step in (0, 10, 999, 1000, 1010, 2500)] == [1, 2, 3, 3, 3, 1]
