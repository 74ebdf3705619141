"""How a plan to roll back is carried out, with parts that only take notes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from steadystep.checkpoints.checkpoint import Checkpoint
from steadystep.diagnosis.facts import Setup
from steadystep.engine.replay import Replayed
from steadystep.engine.rollback import Checkpoints, Rollback, RunProgress
from steadystep.errors import CheckpointError
from steadystep.records import Diagnosis, Finding, Outcome, Plan, Signals
from steadystep.schedule.learning_rate_cut import Ceiling
from steadystep.snapshots.replay_buffer import RecordedUpdate

RESTORED = 40  # updates in the state of step 39
NOW = Signals(step=60, loss=1.0, grad_norm=1.0, lr=0.2)
PLAN = Plan(actions=("rollback", "replay", "cut-lr", "rewarm"), to=39, until=50, lr=0.1, hold=30)


def recorded(step: int, *, groups: int = 1) -> RecordedUpdate:
    return RecordedUpdate(
        (), Signals(step=step, loss=1.0, grad_norm=1.0, lr=0.1), ({"lr": 0.1},) * groups, None, step + 1
    )


MISSED = tuple(recorded(step) for step in range(40, 60))


class Parts:
    """Every part of a rollback; `answers` are what the replays come to, one after the other."""

    leaves_behind = False
    lr_mult = 1.0
    has_room = True

    def __init__(
        self, *answers: Replayed, missed: tuple[RecordedUpdate, ...] = MISSED, passes: Any = ("pass",)
    ) -> None:
        self.log: list[Any] = []
        self.answers, self._missed, self._passes = list(answers), missed, passes
        self.found: Checkpoint | None = None
        self.weights: dict[str, float] = {}
        self.runner = SimpleNamespace(close=lambda: self.log.append("closed"), micro_batches=lambda: self._passes)
        self.ceiling = Ceiling()
        self.grads = ["gradient"]

    # recovery
    def roll_back(self, step: int, *, replay: bool) -> int:
        self.log.append(("restored", step, replay))
        return RESTORED

    def schedules(self) -> Any:
        return lambda: self.log.append("schedules")

    def missed(self, updates: int) -> tuple[RecordedUpdate, ...]:
        assert updates == RESTORED
        return self._missed

    def replayed(self, restored: int, made: Any) -> None:
        self.log.append(("replayed", restored, len(made)))

    def keep_present(self, *, step: int, updates: int, lr: float, to: int) -> bool:
        self.log.append(("kept", step, updates, to))
        return self.has_room

    def come_back(self, step: int) -> None:
        self.log.append(("came back", step))

    @contextmanager
    def untouched(self) -> Iterator[None]:
        yield

    # updater
    def take(self, plan: Plan, view: Any, diagnosis: Diagnosis) -> Outcome:
        self.log.append(("taken", plan))
        return Outcome.of(plan, view.signals, diagnosis, stepped=True)

    def drop_gradients(self, *, overflow: bool) -> None:
        self.log.append(("dropped", overflow))

    def undo(self) -> None:
        self.log.append("undo")

    def prepare(self, plan: Plan) -> None:
        self.log.append(("prepared", plan))

    def report(self, plan: Plan, view: Any, diagnosis: Diagnosis, *, stepped: bool) -> Outcome:
        return Outcome.of(plan, view.signals, diagnosis, stepped=stepped)

    # learning rate
    def options(self) -> tuple[dict[str, float], ...]:
        return ({"lr": 0.2},)

    def times(self, options: Any, mult: float) -> Any:
        return tuple({"lr": group["lr"] * mult} for group in options)

    def put(self, options: Any, *, in_place_of: Any) -> None:
        self.log.append("options")

    # the rest
    def replay(self, missed: Any, measure: Any, **more: Any) -> Replayed:
        self.log.append(("replay", len(missed), more))
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def cancel(self) -> None:
        self.log.append("cancelled")

    def put_back(self) -> None:
        self.log.append("buffers")

    def restore(self) -> Checkpoint | None:
        return self.found

    def rollback(self, *, replay: bool = False) -> Rollback:
        me: Any = self
        weights: Any = SimpleNamespace(weights=lambda _: self.weights)
        return Rollback(
            progress=RunProgress(60, 58),
            updater=me,
            learning_rate=me,
            recovery=me,
            replayer=me,
            measurer=weights,
            buffers=me,
            probing=me,
            checkpoints=me,
            rewarm_steps=50,
            setup=Setup(),
            replay=replay,
        )

    def carry_out(self, plan: Plan = PLAN, *findings: Finding, measures: bool = True) -> Outcome:
        view: Any = SimpleNamespace(signals=NOW, grads=self.grads)
        measure: Any = (lambda kept: None) if measures else None
        return self.rollback().carry_out(plan, view, Diagnosis(findings=findings), measure=measure)

    def of(self, kind: str) -> list[Any]:
        return [entry[1:] for entry in self.log if isinstance(entry, tuple) and entry[0] == kind]


def went(count: int, *, healed: bool = False, exact: bool = True) -> Replayed:
    return Replayed([recorded(40 + number) for number in range(count)], healed=healed, exact=exact)


class TestReplay:
    def test_all_of_them_leave_nothing_to_recover_from(self) -> None:
        parts = Parts(went(21, healed=True))
        outcome = parts.carry_out()
        assert outcome.plan.actions == ("rollback", "replay")
        assert (outcome.plan.lr, outcome.plan.hold) == (None, None)
        assert (outcome.restored, outcome.replayed, outcome.exact, outcome.stepped) == (RESTORED + 21, 21, True, False)
        assert parts.of("replayed") == [(RESTORED, 21)]
        assert [entry for entry in parts.log if isinstance(entry, str)] == [
            "closed",
            "cancelled",
            "schedules",
            "options",
        ]
        assert parts.grads == []
        assert not parts.ceiling.low

    def test_it_may_go_eight_steps_past_the_first_sign_with_the_update_at_hand(self) -> None:
        parts = Parts(went(21, healed=True))
        parts.carry_out()
        assert parts.of("replay") == [(21, {"first_sign": 50, "outside": False, "slack": 8})]

    def test_the_update_at_hand_needs_its_batches(self) -> None:
        parts = Parts(went(20, healed=True), passes=())
        parts.carry_out()
        assert parts.of("replay")[0][0] == 20

    def test_some_of_them(self) -> None:
        parts = Parts(went(10))
        outcome = parts.carry_out()
        assert outcome.plan.actions == PLAN.actions
        assert (outcome.plan.lr, outcome.plan.until) == (0.1, 50)
        assert (outcome.restored, outcome.replayed) == (RESTORED + 10, 10)
        assert "schedules" not in parts.log
        assert "options" not in parts.log
        assert parts.of("prepared") == [(outcome.plan,)]

    def test_none_of_them(self) -> None:
        parts = Parts(went(0))
        outcome = parts.carry_out()
        assert outcome.plan.actions == ("rollback", "cut-lr", "rewarm")
        assert outcome.plan.until is None
        assert (outcome.restored, outcome.replayed, outcome.exact) == (RESTORED, 0, False)

    def test_where_the_trouble_came_again_those_from_its_sign_on_are_not_wanted(self) -> None:
        parts = Parts(went(11), went(9))  # the eleventh is that of step 50
        outcome = parts.carry_out()
        _, second = parts.of("replay")
        assert second == (20, {"first_sign": 50})
        assert parts.of("restored") == [(39, False), (39, False)]
        assert parts.log.count("undo") == 1
        assert outcome.replayed == 9
        alone = Parts(went(10))  # the last is that of step 49
        alone.carry_out()
        assert len(alone.of("replay")) == 1

    def test_all_or_none(self) -> None:
        for count, kept in ((19, 0), (20, 20), (21, 21)):
            parts = Parts(went(count, healed=True))
            outcome = parts.carry_out(replace(PLAN, only_whole=True))
            assert outcome.replayed == kept
            assert len(parts.of("restored")) == 1 + (kept == 0)
        assert Parts(went(19, healed=True)).carry_out().replayed == 19

    def test_what_is_left_behind_is_not_exact(self) -> None:
        assert not Parts(went(21, exact=False, healed=True)).carry_out().exact
        parts = Parts(went(21, healed=True))
        parts.leaves_behind = True
        assert not parts.carry_out().exact
        assert not Parts(went(0)).carry_out().exact

    def test_not_without_a_sign_a_measure_or_the_updates(self) -> None:
        added = (*MISSED[:-1], recorded(59, groups=2))
        for parts, plan, measures in (
            (Parts(), replace(PLAN, until=None), True),
            (Parts(), PLAN, False),
            (Parts(missed=()), PLAN, True),
            (Parts(missed=added), PLAN, True),  # a parameter group was added since
        ):
            outcome = parts.carry_out(plan, measures=measures)
            assert parts.of("replay") == []
            assert (outcome.replayed, outcome.restored) == (0, RESTORED)

    def test_an_exception_leaves_the_restored_state(self) -> None:
        broken: Any = OSError("a disk is full")
        parts = Parts(broken)
        rollback = parts.rollback(replay=True)
        view: Any = SimpleNamespace(signals=NOW, grads=[])
        measure: Any = SimpleNamespace
        with pytest.raises(OSError, match="disk"):
            rollback.carry_out(PLAN, view, Diagnosis(), measure=measure)
        assert rollback.progress.updates == RESTORED
        assert parts.of("replayed") == [(RESTORED, 0)]
        assert parts.of("restored") == [(39, True), (39, True)]


class TestFromOutside:
    """The weights were changed by something else than updates; then, did the updates lead there again?"""

    plan = replace(PLAN, outside=True)

    def jump(self, baseline: float | None = 1.0) -> Finding:
        return Finding(
            detector="weight-jump", step=60, severity="act", value=9.0, limit=2.0, baseline=baseline, where=("w",)
        )

    def test_they_did_not(self) -> None:
        for weight, baseline in ((4.9, 1.0), (5.0, 1.0), (8.9, None)):
            parts = Parts(went(10))
            parts.weights = {"w": weight}
            outcome = parts.carry_out(self.plan, self.jump(baseline))
            assert len(parts.of("replay")) == 1
            assert outcome.plan.actions == ("rollback", "replay")  # the learning rate had no part in it
            assert outcome.plan.lr is None

    def test_they_did(self) -> None:
        parts = Parts(went(10), went(9))
        parts.weights = {"w": 5.1}
        outcome = parts.carry_out(self.plan, self.jump())
        assert parts.of("replay")[1] == (20, {"first_sign": 50})
        assert outcome.plan.actions == PLAN.actions
        assert outcome.replayed == 9

    def test_a_weight_that_is_gone_is_nowhere(self) -> None:
        parts = Parts(went(10))
        assert parts.carry_out(self.plan, self.jump()).replayed == 10

    def test_where_it_went_better_or_nothing_was_made_nobody_asks(self) -> None:
        for answer in (went(10, healed=True), went(0)):
            parts = Parts(answer)
            parts.weights = {"w": 9.0}
            parts.carry_out(self.plan, self.jump())
            assert len(parts.of("replay")) == 1


class TestRewarm:
    @pytest.mark.parametrize(("hold", "steps"), [(None, 50), (30, 30), (80, 50)])
    def test_no_longer_than_the_hold(self, hold: int | None, steps: int) -> None:
        parts = Parts()
        parts.carry_out(replace(PLAN, until=None, hold=hold))
        assert parts.ceiling.state_dict()["rewarm"] == [steps, steps]

    def test_only_where_it_is_planned(self) -> None:
        parts = Parts()
        parts.carry_out(replace(PLAN, until=None, actions=("rollback", "cut-lr")))
        assert not parts.ceiling.low


class TestFromACheckpoint:
    plan = replace(PLAN, to=None, until=None)

    def test_the_newest_is_restored(self) -> None:
        parts = Parts()
        parts.found = Checkpoint(path=Path("x"), step=31, updates=30, score=None, state={})
        outcome = parts.carry_out(self.plan)
        assert (outcome.restored, outcome.plan.to, outcome.stepped) == (30, 31, False)
        assert outcome.plan.actions == self.plan.actions
        assert parts.log[:3] == [("dropped", False), "buffers", "closed"]
        assert "cancelled" in parts.log
        assert parts.of("prepared") == [(outcome.plan,)]
        assert parts.grads == []
        assert parts.ceiling.low  # rewarm

    def test_without_one_the_run_ends(self) -> None:
        parts = Parts()
        outcome = parts.carry_out(self.plan)
        assert outcome.plan.actions == ("skip-step", "stop")
        assert (outcome.restored, outcome.stepped) == (None, False)
        assert parts.of("prepared") == []


class TestCheckpoints:
    found = Checkpoint(path=Path("x"), step=31, updates=30, score=None, state={"guard": {"budget": {"n": 3}}})

    def made(self, found: Checkpoint | None, *, fits: bool = True) -> tuple[Checkpoints, list[Any]]:
        log: list[Any] = []

        def put(state: Any) -> None:
            if not fits:
                raise CheckpointError("it does not fit")
            log.append(state)

        part = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: log.append(("loaded", state)))
        checkpointing: Any = SimpleNamespace(newest_of_this_run=lambda: found)
        loop: Any = SimpleNamespace(roll_back=put)
        recovery: Any = SimpleNamespace(forget=lambda: log.append("forgotten"))
        parts: Any = {"budget": part}
        return Checkpoints(checkpointing, loop, parts, recovery), log

    def test_everything_is_restored_and_snapshots_are_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        checkpoints, log = self.made(self.found)
        monkeypatch.setattr("steadystep.state.load", lambda parts, saved: log.append((list(parts), saved)))
        assert checkpoints.restore() is self.found
        assert log == [self.found.state, (["budget"], {"budget": {"n": 3}}), "forgotten"]

    def test_nothing_is_changed_without_one_that_fits(self) -> None:
        for checkpoints, log in (self.made(None), self.made(self.found, fits=False)):
            assert checkpoints.restore() is None
            assert log == []
        none = replace(self.made(self.found)[0], checkpointing=None)
        assert none.restore() is None

    def test_another_error_is_not_hidden(self) -> None:
        checkpoints, _ = self.made(self.found)
        broken: Any = SimpleNamespace(roll_back=lambda _: {}["missing"])
        with pytest.raises(KeyError):
            replace(checkpoints, loop=broken).restore()


class TestReplayOrNothing:
    PLAN = Plan(actions=("rollback", "replay"), to=39, until=50, outside=True, or_nothing=True)

    def test_what_goes_better_is_kept(self) -> None:
        parts = Parts(went(21, healed=True))
        outcome = parts.carry_out(self.PLAN)
        assert (outcome.plan.actions, outcome.restored, outcome.replayed) == (("rollback", "replay"), RESTORED + 21, 21)
        assert parts.of("kept") == [(59, 58, 39)]
        assert parts.of("came back") == []

    @pytest.mark.parametrize("first", [went(21), went(20, healed=True), went(2, healed=True), went(0)])
    def test_what_does_not_leaves_everything_as_it_was(self, first: Replayed) -> None:
        parts = Parts(first, went(1))
        outcome = parts.carry_out(self.PLAN)
        assert parts.of("came back") == [(59,)]
        assert parts.of("replay")[-1] == (1, {"first_sign": 60, "outside": True})  # the update at hand
        assert (outcome.plan.actions, outcome.restored, outcome.stepped) == ((), None, True)
        assert parts.of("replayed") == []

    def test_without_room_for_the_present_nothing_is_tried(self) -> None:
        for parts, measures in ((Parts(), True), (Parts(), False), (Parts(passes=()), True)):
            parts.has_room = not measures
            outcome = parts.carry_out(self.PLAN, measures=measures)
            assert parts.of("restored") == []
            assert parts.of("taken") == [(Plan(),)]
            assert outcome.stepped
