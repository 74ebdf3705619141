"""What each stage hands to the next, with parts that only take notes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch

from steadystep._utils.tensors import layout_of
from steadystep.engine.pipeline import Pipeline
from steadystep.engine.rollback import RunProgress
from steadystep.engine.verdict import Verdict
from steadystep.errors import MisuseError
from steadystep.records import BitFlip, Diagnosis, Outcome, Plan, Signals
from steadystep.signals.gradients import GradientView

SIGNALS = Signals(step=7, loss=1.0, grad_norm=1.0, lr=0.1, losses=(1.0, 2.0))


def outcome(plan: Plan | None = None, **more: Any) -> Outcome:
    plan = Plan() if plan is None else plan
    return Outcome.of(plan, SIGNALS, Diagnosis(), **{"stepped": True} | more)


def parts(**more: Any) -> Any:
    made = MagicMock()
    made.progress = RunProgress(7, 5)
    made.checksums.armed, made.checksums.every, made.checksums.at = False, 1, -1
    made.recomputation.every = 0
    made.edits.suspected, made.edits.edition, made.judge.edition = False, 0, 0
    made.run_state.data.open = False
    made.runner.given_losses = False
    made.judge.trial.finding = None
    made.judge.turns.are_taken = False
    made.budget.episode.calm.return_value = True
    made.run_history.volunteers.return_value = None
    made.nan_tracer.keeps_history = False
    made.ranks.size = 1
    made.recovery.remembers = True
    made.updater.take.return_value = outcome()
    for name, value in more.items():
        setattr(made, name, value)
    return made


class TestRecord:
    def test_attempts_and_updates_are_counted(self) -> None:
        for done, updates in (
            (outcome(), 6),
            (outcome(stepped=False), 5),
            (outcome(Plan(actions=("rollback",)), stepped=False, restored=3), 3),
            (outcome(Plan(actions=("rollback",)), stepped=False, restored=0), 0),
        ):
            given = parts()
            assert Pipeline(given).record(done) is done
            assert (given.progress.attempts, given.progress.updates) == (8, updates)
            given.budget.count.assert_called_once_with(done)
            given.log.record.assert_called_once_with(done)

    def test_one_that_is_pending_is_only_written_down(self) -> None:
        given = parts()
        pending = Outcome(step=7, reading=1.0, stepped=False, pending=True)
        assert Pipeline(given).record(pending) is pending
        assert given.progress.attempts == 7
        given.log.record.assert_called_once_with(pending)
        given.budget.count.assert_not_called()

    def test_the_history_knows_whether_guards_take_turns(self) -> None:
        for taken in (True, False):
            given = parts()
            given.judge.turns.are_taken = taken
            done = outcome()
            Pipeline(given).record(done)
            assert given.run_history.opposed is taken
            given.run_history.note.assert_called_once_with(SIGNALS, done.diagnosis, stepped=True, plan=done.plan)
        silent = parts()
        Pipeline(silent).record(replace(outcome(), signals=None))
        silent.run_history.note.assert_not_called()

    @pytest.mark.parametrize(
        ("trial", "calm", "expected"), [(None, True, True), (None, False, False), ("open", True, False)]
    )
    def test_no_snapshot_is_planned_while_one_is_tried(self, trial: Any, calm: bool, expected: bool) -> None:
        given = parts()
        given.judge.trial.finding = trial
        given.budget.episode.calm.return_value = calm
        given.budget.episode.suspected_since.return_value = 3
        given.runner.given_losses = "given"
        Pipeline(given).record(outcome())
        assert given.recovery.after.call_args.kwargs == {
            "updates": 6,
            "calm": expected,
            "suspected_since": 3,
            "at_once": "given",
        }
        given.budget.episode.suspected_since.assert_called_once_with(7)

    def test_the_batch_that_is_out_was_used(self) -> None:
        for is_open in (True, False):
            given = parts()
            given.run_state.data.open = is_open
            Pipeline(given).record(outcome())
            assert given.run_state.data.is_used is is_open

    def test_edits_and_metrics_of_the_step_are_over(self) -> None:
        for suspected in (True, False):
            given = parts()
            given.edits.suspected = suspected
            pipeline = Pipeline(given)
            pipeline.metrics["kl"] = 1.0
            pipeline.record(outcome())
            assert pipeline.metrics == {}
            assert given.edits.forget.called is suspected

    def test_incidents_remember_the_steps_before_them(self) -> None:
        for keeps in (True, False):
            given = parts()
            given.nan_tracer.keeps_history = keeps
            done = outcome()
            Pipeline(given).record(done)
            assert given.nan_tracer.note.mock_calls == [call(done)] * keeps

    def test_what_the_history_volunteers_is_written_down(self) -> None:
        given = parts()
        given.run_history.volunteers.return_value = "belief"
        Pipeline(given).record(outcome())
        given.log.volunteered.assert_called_once_with(7, "belief")
        silent = parts()
        Pipeline(silent).record(outcome())
        silent.log.volunteered.assert_not_called()

    def test_a_stop_is_raised_unless_the_step_was_taken(self) -> None:
        for actions, stepped, halts in (
            (("skip-step", "stop"), False, True),
            (("stop",), True, False),
            (("skip-step",), False, False),
        ):
            given = parts()
            given.budget.halt.return_value = KeyError("halt")
            done = outcome(Plan(actions=actions), stepped=stepped)
            if halts:
                with pytest.raises(KeyError, match="halt"):
                    Pipeline(given).record(done)
                given.budget.halt.assert_called_once_with(done)
            else:
                Pipeline(given).record(done)

    @pytest.mark.parametrize(
        ("given_losses", "is_open", "members", "saves"),
        [(True, False, 0, True), (False, False, 0, False), (True, True, 0, False), (True, False, 1, False)],
    )
    def test_a_checkpoint_may_be_written_after_a_loss_that_was_given(
        self, given_losses: bool, is_open: bool, members: int, saves: bool
    ) -> None:
        given = parts()
        given.runner.given_losses, given.run_state.data.open = given_losses, is_open
        given.runner.group.members = [None] * members
        Pipeline(given).record(outcome())
        assert given.run_state.between.mock_calls == [call(8, 6)] * saves

    def test_without_checkpoints_nothing_is_written(self) -> None:
        given = parts()
        given.runner.group.members = []
        given.run_state.checkpoints = None
        Pipeline(given).between()
        given.run_state.between.assert_not_called()


class TestApply:
    def applied(self, given: Any, plan: Plan | None = None) -> Outcome:
        view: Any = SimpleNamespace(signals=SIGNALS)
        return Pipeline(given).apply(view, Verdict(SIGNALS, Diagnosis(), Plan() if plan is None else plan))

    def test_an_update_is_remembered_with_the_options_that_were_used(self) -> None:
        for mult, options in ((1.0, ({"lr": 0.1},)), (0.5, "halved")):
            given = parts()
            given.runner.micro_batches.return_value = ("pass",)
            given.learning_rate.options.return_value = ({"lr": 0.1},)
            given.learning_rate.times.return_value = "halved"
            taken = replace(outcome(), lr_mult=mult)
            given.updater.take.return_value = taken
            assert self.applied(given) is taken
            given.recovery.remember.assert_called_once_with(("pass",), taken, 6, options, given.run_state.data.place)
            assert given.learning_rate.times.mock_calls == [call(({"lr": 0.1},), 0.5)] * (mult != 1.0)

    def test_not_where_it_cannot_be_replayed(self) -> None:
        refused, partly = outcome(stepped=False), replace(outcome(), left_out=(1,))
        for remembers, at_hand, passes, taken in (
            (False, ("work", None), ("pass",), outcome()),
            (True, None, ("pass",), outcome()),
            (True, ("work", None), (), outcome()),
            (True, ("work", None), ("pass",), refused),
            (True, ("work", None), ("pass",), partly),
        ):
            given = parts()
            given.recovery.remembers, given.runner.at_hand = remembers, at_hand
            given.runner.micro_batches.return_value = passes
            given.updater.take.return_value = taken
            self.applied(given)
            given.recovery.remember.assert_not_called()

    def test_a_healthy_step_opens_no_case(self) -> None:
        given = parts()
        self.applied(given)
        given.nan_tracer.open.assert_not_called()
        given.nan_tracer.close.assert_not_called()

    def test_a_refused_one_is_traced_before_and_after(self) -> None:
        for case in (None, "case"):
            given = parts()
            given.nan_tracer.open.return_value = case
            plan = Plan(actions=("skip-step",))
            result = self.applied(given, plan)
            assert given.nan_tracer.open.call_args.args[0] is plan
            assert given.nan_tracer.open.call_args.kwargs == {"updates": 5}
            refused = given.rollback.refused.return_value
            assert given.rollback.refused.call_args.args == (
                given.updater.refuse.return_value,
                given.run_state.data.place,
            )
            assert result is (refused if case is None else given.nan_tracer.close.return_value)
            assert given.nan_tracer.close.mock_calls == ([] if case is None else [call(refused, "case")])

    def test_each_plan_goes_to_whoever_carries_it_out(self) -> None:
        for actions, taken, refused, rolled in (
            ((), 1, 0, 0),
            (("rescale",), 1, 0, 0),
            (("cut-lr",), 1, 0, 0),
            (("skip-step",), 0, 1, 0),
            (("rollback",), 0, 0, 1),
        ):
            given, plan = parts(), Plan(actions=actions)
            self.applied(given, plan)
            counts = [part.call_count for part in (given.updater.take, given.updater.refuse, given.rollback.carry_out)]
            assert counts == [taken, refused, rolled], actions
            assert given.updater.prepare.called is (bool(actions) and not rolled)

    @pytest.mark.parametrize(
        ("actions", "overflow"), [(("skip-step",), False), (("skip-step", "back-off-scale"), True)]
    )
    def test_an_overflow_is_reported_to_the_scaler(self, actions: Any, overflow: bool) -> None:
        given = parts()
        self.applied(given, Plan(actions=actions))
        assert given.updater.refuse.call_args.kwargs == {"overflow": overflow}

    def test_a_group_goes_on_without_its_bad_members(self) -> None:
        given = parts()
        given.runner.reruns.without_bad.return_value = (1,), SimpleNamespace(signals=SIGNALS)
        self.applied(given, Plan(actions=("leave-out",)))
        assert given.updater.take.call_args.kwargs == {"left_out": (0,)}
        given.updater.refuse.assert_not_called()

    @pytest.mark.parametrize(
        ("scaled", "loss", "overflow"),
        [(True, 1.0, True), (True, float("nan"), False), (False, 1.0, False)],
    )
    def test_or_is_refused_with_all_of_them(self, scaled: bool, loss: float, overflow: bool) -> None:
        given = parts()
        again = SimpleNamespace(signals=replace(SIGNALS, scaled=scaled, loss=loss))
        given.runner.reruns.without_bad.return_value = (), again
        self.applied(given, Plan(actions=("leave-out",)))
        given.updater.take.assert_not_called()
        assert given.updater.refuse.call_args.kwargs == {"overflow": overflow}


class TestFlippedBits:
    @pytest.mark.parametrize(
        ("repaired", "used", "repeats", "again"),
        [(True, True, True, True), (True, True, False, False), (True, False, True, False), (False, True, True, False)],
    )
    def test_gradients_are_computed_again_where_that_helps(
        self, repaired: bool, used: bool, repeats: bool, again: bool
    ) -> None:
        flip = BitFlip(tensor="w", index=0, bit=1, repaired=repaired, used=used)
        given = parts()
        given.runner.reruns.repeat.return_value = repeats
        given.runner.group.members = [SimpleNamespace(loss=torch.ones(()), weight=1.0, batch=None)]
        fresh = GradientView(SIGNALS, [], layout_of([]), [], None)
        given.measurer.measure.return_value = fresh
        view = replace(fresh, signals=replace(SIGNALS, bit_flips=(flip,)))
        seen = Pipeline(given)._recomputed(view)
        assert seen.signals.bit_flips == (replace(flip, used=False) if again else flip,)
        assert (seen is view) is not again

    def test_one_that_stays_spoils_them_again(self) -> None:
        mended = BitFlip(tensor="w", index=0, bit=1, repaired=True, used=True)
        given = parts()
        view = GradientView(
            replace(SIGNALS, bit_flips=(mended, replace(mended, repaired=False))), [], layout_of([]), [], None
        )
        assert Pipeline(given)._recomputed(view) is view
        given.runner.reruns.repeat.assert_not_called()

    def test_they_are_compared_with_the_read_of_the_step(self) -> None:
        given = parts()
        given.checksums.armed = True
        flip = BitFlip(tensor="w", index=0, bit=1, repaired=True)
        given.checksums.found.return_value = (flip,)
        given.checksums.compare.return_value, given.measurer.riders = ["flag"], ["of a product"]
        given.measurer.measure.return_value = GradientView(SIGNALS, [], layout_of([]), [], None)
        view = Pipeline(given).measure_losses([torch.ones(())])
        assert view.signals.bit_flips == (flip,)
        assert given.measurer.riders == ["flag", "of a product"]
        given.checksums.found.assert_called_once_with(given.measurer.ridden)

    @pytest.mark.parametrize(
        ("armed", "due", "called"), [(True, False, True), (False, True, True), (False, False, False)]
    )
    def test_sums_are_renewed_when_it_is_time(self, armed: int, due: int, called: bool) -> None:
        given = parts()
        given.checksums.armed, given.checksums.every, given.checksums.at = bool(armed), 2, 1 if due else 0
        Pipeline(given).record(outcome())
        assert given.checksums.renew.called is called


class TestJudge:
    def test_other_weights_begin_another_past(self) -> None:
        for edition, begins in ((0, False), (1, True)):
            given = parts()
            given.edits.edition = edition
            verdict = Pipeline(given).judge(SimpleNamespace(signals=SIGNALS))  # type: ignore[arg-type]
            assert verdict is given.judge.judge.return_value
            assert given.recovery.forget.called is begins
            assert given.judge.start_again.mock_calls == [call(1)] * begins

    def test_edits_are_counted_when_suspected(self) -> None:
        for suspected in (True, False):
            given = parts()
            given.edits.suspected = suspected
            Pipeline(given).judge(SimpleNamespace(signals=SIGNALS))  # type: ignore[arg-type]
            assert given.edits.count.called is suspected

    def test_the_judge_hears_of_updates_and_ceiling(self) -> None:
        given = parts()
        given.learning_rate.ceiling.lr = 0.05
        Pipeline(given).judge(SimpleNamespace(signals=SIGNALS), careful=True, clipped=True)  # type: ignore[arg-type]
        given.judge.judge.assert_called_once_with(SIGNALS, updates=5, ceiling=0.05, careful=True, clipped=True)


class TestMeasure:
    def test_of_those_that_are_kept(self) -> None:
        given = parts()
        members = [
            SimpleNamespace(loss=torch.tensor(float(number)), weight=number + 1.0, batch=batch)
            for number, batch in enumerate(("a", None, "c"))
        ]
        given.runner.group.members = members
        given.precision.scales = False
        given.budget.refused_in_a_row = 4
        pipeline = Pipeline(given)
        pipeline.measure(range(3))
        asked = given.measurer.measure.call_args.kwargs
        assert [float(loss) for loss in asked["losses"]] == [0.0, 1.0, 2.0]
        assert (asked["weights"], asked["batches"]) == ([1.0, 2.0, 3.0], ["a", "c"])
        assert (asked["step"], asked["refused_in_a_row"], asked["scale"]) == (7, 4, None)
        pipeline.measure([0, 2])
        asked = given.measurer.measure.call_args.kwargs
        assert [float(loss) for loss in asked["losses"]] == [0.0, 2.0]
        assert asked["weights"] == [1.0, 3.0]
        assert given.runner.finish.mock_calls == [call(range(3)), call([0, 2])]

    def test_several_ranks_agree(self) -> None:
        given = parts()
        assert Pipeline(given).measure_losses([torch.ones(())]) is given.measurer.measure.return_value
        assert given.measurer.measure.call_args.kwargs["weights"] == [1.0]
        given.ranks.size = 2
        found = Pipeline(given).measure_losses([torch.ones(())], refused_in_a_row=0)
        assert found is given.measurer.weighed.return_value
        given.measurer.weighed.assert_called_once_with(given.recomputation.flips.agree.return_value)
        assert given.measurer.measure.call_args.kwargs["refused_in_a_row"] == 0


class TestRest:
    def test_a_commit_needs_an_inspection(self) -> None:
        given = parts()
        given.updater.report.return_value = outcome()
        given.measurer.measure.return_value = outcome()  # any record with signals
        given.judge.judge.return_value = Verdict(SIGNALS, Diagnosis(), Plan(actions=("skip-step",)))
        pipeline = Pipeline(given)
        with pytest.raises(MisuseError, match="inspect"):
            pipeline.commit(stepped=True)
        assert pipeline.inspect(torch.ones(())).actions == ("skip-step",)
        assert given.judge.judge.call_args.kwargs["careful"] is True
        assert given.measurer.measure.call_args.kwargs["refused_in_a_row"] == 0
        given.learning_rate.place.assert_called_once_with(5)
        pipeline.commit(stepped=False)
        assert given.updater.report.call_args.kwargs == {"stepped": False}
        with pytest.raises(MisuseError):
            pipeline.commit(stepped=True)

    def test_a_validation_is_told_to_all(self) -> None:
        given = parts()
        given.ranks.validation.return_value = 0.5  # the mean over all ranks
        Pipeline(given).validated(0.4, {"accuracy": 0.9})
        given.ranks.validation.assert_called_once_with(0.4)
        given.learning_rate.validated.assert_called_once_with(0.5)
        given.run_state.validated.assert_called_once_with(0.5)
        given.log.validated.assert_called_once_with(7, {"val_loss": 0.5, "accuracy": 0.9})

    def test_an_open_group_is_dropped_and_not_saved(self) -> None:
        for dropped, save, saved in ((0, True, True), (0, False, False), (2, True, False)):
            given = parts()
            given.runner.reset.return_value = dropped
            pipeline = Pipeline(given)
            if dropped:
                with pytest.warns(UserWarning, match="2 micro-batches"):
                    pipeline.close(save=save)
            else:
                pipeline.close(save=save)
            given.run_state.close.assert_called_once_with(7, 5, save=saved)
            given.close.assert_called_once_with()

    def test_parts_are_let_go_also_after_an_error(self) -> None:
        given = parts()
        given.runner.reset.return_value = 0
        given.run_state.close.side_effect = OSError("a disk is full")
        with pytest.raises(OSError, match="disk"):
            Pipeline(given).close(save=True)
        given.close.assert_called_once_with()

    def test_gradients_are_sampled_when_it_is_time(self) -> None:
        for wants, due, samples in ((True, True, 1), (True, False, 0), (False, True, 0)):
            given = parts()
            given.log.wants_samples = wants
            given.gradient_samples.due.return_value = due
            given.runner.group.stale = False
            given.judge.judge.return_value = Verdict(SIGNALS)
            given.measurer.measure.return_value = SimpleNamespace(signals=SIGNALS, names=("w",), grads=["gradient"])
            given.runner.group.members = [SimpleNamespace(loss=torch.ones(()), weight=1.0, batch=None)]
            Pipeline(given).step()
            assert len(given.log.sampled.mock_calls) == samples

    def test_the_schedule_is_placed_before_a_step(self) -> None:
        for scheduled in (True, False):
            given = parts()
            given.learning_rate.scheduled = scheduled
            given.runner.group.stale = True
            given.runner.group.members = [SimpleNamespace(batch=None)]
            given.runner.reruns.refresh.return_value = False
            given.updater.drop.return_value = outcome(stepped=False)
            Pipeline(given).step()
            assert given.learning_rate.place.mock_calls == [call(5)] * scheduled
            assert given.updater.drop.call_args.args[0] == 7
            given.measurer.measure.assert_not_called()
