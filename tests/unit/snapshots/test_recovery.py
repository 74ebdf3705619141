"""When a state is taken, and what is remembered with it."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from steadystep.records import Outcome, Signals
from steadystep.snapshots.recovery import InMemory

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
