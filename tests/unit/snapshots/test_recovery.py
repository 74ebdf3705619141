"""When a state is taken, and what is remembered with it."""

import math
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from steadystep.records import Outcome, Plan, Signals
from steadystep.snapshots.no_recovery import NoRecovery
from steadystep.snapshots.recovery import InMemory
from steadystep.snapshots.replay_buffer import RecordedMicroBatch, RecordedUpdate, ReplayBuffer

CALM = Signals(step=100, loss=2.0, grad_norm=1.0, lr=0.1)


class Fakes:
    """Stands for snapshots: what is taken is written down."""

    next_step = 0

    def __init__(self) -> None:
        self.states: tuple[Any, ...] = ()
        self.taken: list[dict[str, Any]] = []

    def due(self, step: int) -> bool:
        return True

    def take(self, **more: Any) -> None:
        self.taken.append(more)
        self.states = (*self.states, SimpleNamespace(**more))

    def keep(self, name: str, thing: Any, update: Any = None) -> None:
        pass

    def forget(self) -> None:
        self.states = ()


class TestWhenAStateIsTaken:
    def made(self) -> tuple[InMemory, Fakes]:
        fakes = Fakes()
        recovery = InMemory(fakes, {})
        recovery.begin(step=0, updates=0)
        assert [taken["step"] for taken in fakes.taken] == [-1]  # what the user came with
        return recovery, fakes

    def after(self, recovery: InMemory, step: int, **more: Any) -> None:
        plain = {"calm": True, "suspected_since": None, "updates": step + 1}
        outcome = Outcome(step=step, reading=1.0, stepped=more.pop("stepped", True), signals=CALM, lr_mult=0.5)
        recovery.after(outcome, **plain | more)
        recovery.begin(step=step + 1, updates=step + 1)

    def test_with_the_learning_rate_that_was_in_use(self) -> None:
        recovery, fakes = self.made()
        self.after(recovery, 7)
        taken = fakes.taken[-1]
        assert (taken["step"], taken["updates"]) == (7, 8)
        assert taken["lr"] == taken["largest_lr"] == pytest.approx(0.05)
        assert taken["suspected_since"] is None

    def test_what_is_set_aside_under_suspicion_was_trusted_when_it_began(self) -> None:
        recovery, fakes = self.made()  # 20 steps of trust
        self.after(recovery, 100, suspected_since=90)
        kept = fakes.taken[-1]["suspected_since"]
        assert [step for step in (69, 70, 71) if step < kept] == [69, 70]

    def test_not_in_trouble_nor_after_a_refusal(self) -> None:
        recovery, fakes = self.made()
        self.after(recovery, 7, calm=False)
        self.after(recovery, 8, stepped=False)
        assert len(fakes.taken) == 1

    def test_at_once_when_something_new_is_kept(self) -> None:
        recovery, fakes = self.made()
        recovery.keep("ema", nn.Linear(1, 1))
        recovery.begin(step=5, updates=5)
        assert [taken["step"] for taken in fakes.taken] == [-1, 4]

    def test_before_the_next_forward_pass_when_losses_are_given(self) -> None:
        recovery, fakes = self.made()
        outcome = Outcome(step=7, reading=1.0, stepped=True, signals=CALM)
        recovery.after(outcome, updates=8, calm=True, suspected_since=None, at_once=True)
        assert fakes.taken[-1]["step"] == 7

    def test_a_state_belongs_between_two_steps(self) -> None:
        recovery, fakes = self.made()
        outcome = Outcome(step=7, reading=1.0, stepped=True, signals=CALM)
        recovery.after(outcome, updates=8, calm=True, suspected_since=None)
        assert len(fakes.taken) == 1
        assert recovery.due == CALM.lr
        recovery.begin(step=8, updates=8)
        assert recovery.due is None
        recovery.begin(step=9, updates=9)
        assert [taken["step"] for taken in fakes.taken] == [-1, 7]

    def test_not_before_it_is_time(self) -> None:
        recovery, fakes = self.made()
        fakes.next_step = 8
        self.after(recovery, 7)
        assert len(fakes.taken) == 1
        self.after(recovery, 8)
        assert len(fakes.taken) == 2
        fakes.due = lambda step: False
        self.after(recovery, 9)
        assert len(fakes.taken) == 2

    def test_the_largest_learning_rate_of_all_updates(self) -> None:
        recovery, fakes = self.made()
        for step, lr, mult in ((1, 0.2, 1.0), (2, 0.8, 0.5), (3, 9.0, 0.0), (4, 0.1, 1.0)):
            signals = Signals(step=step, loss=2.0, grad_norm=1.0, lr=lr)
            outcome = Outcome(step=step, reading=1.0, stepped=True, signals=signals, lr_mult=mult)
            recovery.after(outcome, updates=step, calm=True, suspected_since=None, at_once=True)
            assert recovery.lr_mult == mult
        assert [taken["largest_lr"] for taken in fakes.taken[1:]] == [0.2, 0.4, 0.4, 0.4]
        assert [taken["lr"] for taken in fakes.taken[1:]] == [0.2, 0.4, 0.0, 0.1]

    def test_a_refused_update_changes_no_learning_rate(self) -> None:
        recovery, _ = self.made()
        self.after(recovery, 7)
        refused = Outcome(step=8, reading=1.0, stepped=False, signals=CALM, lr_mult=0.1)
        recovery.after(refused, updates=8, calm=True, suspected_since=None)
        unread = Outcome(step=8, reading=1.0, stepped=True, signals=None, lr_mult=0.1)
        recovery.after(unread, updates=8, calm=True, suspected_since=None)
        assert recovery.lr_mult == 0.5
        assert recovery.due is None


def recorded(number: int) -> RecordedUpdate:
    return RecordedUpdate((), CALM, ({"lr": 0.1},), updates=number)


class Part:
    """A part of the guard with one number."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class TestTheUpdatesSince:
    def made(self, **more: Any) -> tuple[InMemory, Fakes, ReplayBuffer]:
        fakes, buffer = Fakes(), ReplayBuffer(max_bytes=100)
        return InMemory(fakes, {}, replay_buffer=buffer, **more), fakes, buffer

    def remember(self, recovery: InMemory, number: int, **more: Any) -> None:
        outcome = Outcome(step=number, reading=1.0, stepped=True, **{"signals": CALM} | more)
        recovery.remember((), outcome, updates=number, options=({"lr": 0.1},))
        recovery.after(outcome, updates=number, calm=False, suspected_since=None)

    def test_those_after_a_state(self) -> None:
        recovery, _, _ = self.made()
        for number in range(1, 6):
            self.remember(recovery, number)
        missed = recovery.missed(2)
        assert [done.updates for done in missed] == [3, 4, 5]
        assert missed[0].signals is CALM
        assert missed[0].options == ({"lr": 0.1},)
        assert recovery.missed(5) == ()

    @pytest.mark.parametrize(
        ("signals", "options", "count"), [(CALM, (), 0), (None, ({"lr": 0.1},), 0), (CALM, ({"lr": 0.1},), 1)]
    )
    def test_only_what_could_be_replayed(self, signals: Any, options: Any, count: int) -> None:
        recovery, _, buffer = self.made()
        outcome = Outcome(step=1, reading=1.0, stepped=True, signals=signals)
        recovery.remember((), outcome, updates=1, options=options)
        assert len(buffer.since(0, until=1)) == count

    def test_without_a_buffer_nothing_is_remembered(self) -> None:
        recovery = InMemory(Fakes(), {})
        assert not recovery.remembers
        assert self.made()[0].remembers

    @pytest.mark.parametrize(("trust", "reach"), [(20, 128), (4, 112)])
    def test_they_are_dropped_when_a_state_contains_them_that_is_old_enough(self, trust: int, reach: int) -> None:
        recovery, fakes, _ = self.made(trust_steps=trust)
        recovery.begin(step=1, updates=0)
        for number in range(1, 6):
            self.remember(recovery, number)
        for step, updates in ((10, 2), (11, 3)):
            recovery.due = 0.1
            recovery.begin(step=step + 1, updates=updates)
        recovery.due = 0.1
        recovery.begin(step=10 + reach, updates=5)  # the state of step 10 is a step too young
        assert [done.updates for done in recovery.missed(0)] == [1, 2, 3, 4, 5]
        recovery.due = 0.1
        recovery.begin(step=10 + reach + 1, updates=5)
        assert recovery.missed(1) == ()
        assert [done.updates for done in recovery.missed(2)] == [3, 4, 5]
        assert [state.step for state in fakes.states] == [0, 10, 11, 9 + reach, 10 + reach]

    def test_after_a_replay_they_are_those_that_were_made_again(self) -> None:
        recovery, fakes, _ = self.made()
        settled: list[bool] = []
        fakes.settle = lambda: settled.append(True)
        for number in range(1, 6):
            self.remember(recovery, number)
        again = [recorded(4), recorded(5)]
        recovery.replayed(2, again)
        outcome = Outcome(step=9, reading=1.0, stepped=False, signals=CALM)
        recovery.after(outcome, updates=4, calm=False, suspected_since=None)
        assert [done.updates for done in recovery.missed(0)] == [1, 2, 3, 4]
        assert settled == [True]

    def test_a_rollback_restores_the_parts_of_the_guard_too(self) -> None:
        recovery, fakes, _ = self.made()
        part, later = Part(1), Part(2)
        recovery._parts["one"] = part
        recovery.take_along({"two": later})
        recovery.begin(step=5, updates=5)
        part.value, later.value = 8, 9
        asked = []

        def roll_back(step: int, *, replay: bool) -> Any:
            asked.append((step, replay))
            return fakes.states[0]

        fakes.roll_back = roll_back
        recovery.due = 0.1
        assert recovery.roll_back(4, replay=True) == 5
        assert asked == [(4, True)]
        assert (part.value, later.value) == (1, 2)
        assert recovery.due is None

    def test_weights_that_somebody_replaced_belong_to_nothing_remembered(self) -> None:
        recovery, fakes, _ = self.made()
        recovery.begin(step=0, updates=0)
        self.remember(recovery, 1)
        recovery.forget()
        assert recovery.missed(0) == ()
        assert recovery.states == fakes.states == ()
        assert recovery.due == math.inf

    def test_states_that_no_longer_fit_are_dropped_on_all_ranks(self) -> None:
        called = []

        def on_all(action: Any) -> Any:
            return lambda: called.append(action)

        fakes = Fakes()
        recovery = InMemory(fakes, {}, ranks=SimpleNamespace(on_all=on_all))
        recovery.outdate()
        assert called == []  # without a state there is nobody to tell
        recovery.begin(step=0, updates=0)
        assert recovery.due is None
        recovery.outdate()
        assert fakes.states
        called[0]()
        assert not fakes.states
        assert recovery.due == math.inf

    def test_the_snapshots_are_asked(self) -> None:
        recovery, fakes, _ = self.made()
        calls: list[Any] = []
        fakes.finite = lambda: ["finite"]
        fakes.weights_of = lambda snapshot: ("weights", snapshot)
        fakes.follow = lambda: calls.append("follow")
        fakes.leaves_behind = True
        fakes.schedules = lambda: "schedules"
        fakes.is_as_it_was = lambda updates: updates == 3
        fakes.moments_back = lambda step: calls.append(("moments", step))
        fakes.restore_kept = lambda tensors: calls.append(("kept", tensors))
        recovery.follow()
        recovery.restore_moments(4)
        recovery.restore_kept(["a"])
        assert calls == ["follow", ("moments", 4), ("kept", ["a"])]
        assert recovery.finite_states() == ["finite"]
        assert recovery.weights_of("x") == ("weights", "x")
        assert recovery.leaves_behind is True
        assert recovery.schedules() == "schedules"
        assert recovery.is_as_it_was(3)
        assert not recovery.is_as_it_was(4)


def test_without_recovery_nothing_is_remembered_and_nothing_restored() -> None:
    recovery = NoRecovery()
    outcome = Outcome(step=1, reading=1.0, stepped=True, signals=CALM)
    recovery.keep("net", nn.Linear(1, 1))
    recovery.begin(step=1, updates=1)
    recovery.remember((), outcome, updates=1, options=({"lr": 0.1},))
    recovery.after(outcome, updates=1, calm=True, suspected_since=None)
    recovery.outdate()
    recovery.forget()
    assert (recovery.remembers, recovery.leaves_behind, recovery.due, recovery.lr_mult) == (False, False, None, 1.0)
    assert (recovery.states, recovery.finite_states(), recovery.missed(0)) == ((), [], ())
    assert recovery.is_as_it_was(0)
    assert recovery.schedules()() is None
    for never in (lambda: recovery.roll_back(0, replay=False), lambda: recovery.restore_moments(0)):
        with pytest.raises(AssertionError):
            never()


class TestThereAndBack:
    """A rollback that is tried: what is there now is kept beside the state it goes to."""

    def made(self) -> tuple[InMemory, Fakes, Part]:
        fakes, part = Fakes(), Part(1)
        return InMemory(fakes, {"part": part}), fakes, part

    @pytest.mark.parametrize(("left", "both"), [((4, 30), True), ((30,), False), ((4,), False), ((4, 30, 20), False)])
    def test_both_states_have_to_be_there(self, left: tuple[int, ...], both: bool) -> None:
        recovery, fakes, _ = self.made()
        fakes.take = lambda **more: (  # type: ignore[method-assign]
            fakes.taken.append(more),
            setattr(fakes, "states", tuple(SimpleNamespace(step=step, updates=step) for step in left)),
        )
        assert recovery.keep_present(step=30, updates=25, lr=0.1, to=4) is both
        taken = fakes.taken[0]
        assert (taken["step"], taken["updates"], taken["lr"], taken["suspected_since"]) == (30, 25, 0.1, 5)

    def test_coming_back_restores_the_parts_of_then(self) -> None:
        recovery, fakes, part = self.made()
        assert not recovery.keep_present(step=30, updates=25, lr=0.1, to=4)
        part.value, asked = 9, []
        fakes.come_back = lambda step: (asked.append(step), fakes.states[0])[1]  # type: ignore[attr-defined]
        recovery.come_back(30)
        assert (asked, part.value) == ([30], 1)

    def test_a_state_is_pinned_by_its_step(self) -> None:
        recovery, fakes, _ = self.made()
        recovery.pin(30)
        assert fakes.pinned == 30  # type: ignore[attr-defined]

    @pytest.mark.parametrize("same", [True, False])
    def test_updates_are_replayed_only_where_all_ranks_know_as_many(self, same: bool) -> None:
        asked: list[Any] = []
        ranks = SimpleNamespace(on_all=lambda action: action, same=lambda value: asked.append(value) or same)
        recovery = InMemory(Fakes(), {}, replay_buffer=ReplayBuffer(max_bytes=100), ranks=ranks)
        outcome = Outcome(step=1, reading=1.0, stepped=True, signals=CALM)
        batch = RecordedMicroBatch(SimpleNamespace(batch=None, closure=None, rng=None), None)
        recovery.remember((batch, batch), outcome, updates=1, options=({"lr": 0.1},))
        recovery.after(outcome, updates=1, calm=False, suspected_since=None)
        assert len(recovery.missed(0)) == same
        assert asked == [[2]]

    def test_what_one_rank_leaves_behind_all_do(self) -> None:
        for mine, others in product((False, True), repeat=2):
            ranks = SimpleNamespace(on_all=lambda action: action, all=lambda here, others=others: here and not others)
            recovery = InMemory(SimpleNamespace(leaves_behind=mine), {}, ranks=ranks)
            assert recovery.leaves_behind is (mine or others)

    def test_an_update_is_remembered_with_its_place_and_what_its_gradient_was_held_to(self) -> None:
        recovery = InMemory(Fakes(), {}, replay_buffer=ReplayBuffer(max_bytes=100))
        outcome = Outcome(step=1, reading=1.0, stepped=True, signals=CALM, plan=Plan(norm=0.25))
        recovery.remember((), outcome, updates=1, options=({"lr": 0.1},), place=(3, 7))
        recovery.after(outcome, updates=1, calm=False, suspected_since=None)
        (done,) = recovery.missed(0)
        assert (done.norm, done.place, done.epoch) == (0.25, (3, 7), 3)
        assert recovery.remembered(5) == []


def test_what_is_never_asked_for_without_a_state() -> None:
    recovery = NoRecovery()
    recovery.pin(3)
    recovery.follow()
    recovery.take_along({})
    recovery.replayed(0, ())
    recovery.restore_kept(["a"])
    assert recovery.remembered(3) == []
    assert recovery.keep_present(step=1, updates=1, lr=0.1, to=0) is False
    for never in (lambda: recovery.come_back(0), lambda: recovery.weights_of(SimpleNamespace())):
        with pytest.raises(AssertionError):
            never()
