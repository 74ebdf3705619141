"""Which steps of several optimizers belong to one decision.

    loss.backward(); muon.step(); adamw.step()                        # one loss: decided in the first step, for both
    d_loss.backward(); opt_d.step(); g_loss.backward(); opt_g.step()  # they take turns: each loss is judged by itself

A loop does not say which of the two it is, so it is seen: a step that comes without a backward pass after a decision
belongs to that decision. Who follows whom is learned in the first round; from then on a decision stays open until the
last of them has stepped, so that no state is kept, and nothing reported, between two halves of one update.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.nn import Parameter
from torch.optim import Optimizer

from steadystep.detectors import sees_every_step
from steadystep.diagnosis import RollbackTrial
from steadystep.engine.judge import Judge
from steadystep.engine.parts import Parts
from steadystep.engine.verdict import Turns
from steadystep.state import DETECTOR
from steadystep.watching.collected import Collected

_Marks = list[tuple[int, int] | None]


@final
class Rounds:
    """Tells leaders (who ask for a decision) from followers (whose step belongs to the last one)."""

    def __init__(self, optimizers: Sequence[Optimizer], seen: Collected, scaler: GradScaler | None) -> None:
        self._all = tuple(optimizers)
        self._seen = seen
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._followers: dict[int, set[int]] = {}
        """Of each leader, as of its last round."""
        self._leader = 0
        self._stepped: set[int] = set()
        self._included: set[int] = set()
        self._passes = -1
        self._marks = [_marks(optimizer) for optimizer in self._all]

    def place(self, optimizer: Optimizer) -> int:
        """Its position in the list."""
        return next(i for i, each in enumerate(self._all) if each is optimizer)

    def leads(self, optimizer: Optimizer) -> bool:
        """Whether this step asks for a decision."""
        place = self.place(optimizer)
        return self._seen.passes != self._passes or place not in self._included or place in self._stepped

    def begin(self, optimizer: Optimizer) -> list[Parameter]:
        """A decision; returns the parameters that it is not about.

        It is about those whose gradients came from the backward passes since the last one: what is left over from an
        earlier turn is not judged a second time. Scaled gradients are left to the step that unscales them.
        """
        self._followers[self._leader] = self._stepped - {self._leader}
        self._leader = self.place(optimizer)
        self._stepped, self._passes = set(), self._seen.passes
        fresh = {i for i, each in enumerate(self._all) if _marks(each) != self._marks[i] and self._is_unscaled(each)}
        self._included = fresh | {self._leader}
        return [p for i, each in enumerate(self._all) if i not in self._included for p in _parameters(each)]

    @property
    def is_of_the_last_pass(self) -> bool:
        """No backward pass has come since the last decision."""
        return self._seen.passes == self._passes

    def follows(self, optimizer: Optimizer) -> bool:
        """Whether its step was not the one that asked for the decision at hand."""
        return self.place(optimizer) != self._leader

    @property
    def all_stepped(self) -> bool:
        """Every one that the decision at hand is about has been stepped."""
        return self._included <= self._stepped

    def ends_with(self, optimizer: Optimizer) -> bool:
        """A step is over; whether it was the last one of its decision."""
        self._stepped.add(self.place(optimizer))
        return self._followers.get(self._leader, set()) <= self._stepped

    def before_backward(self) -> None:
        """A gradient that is gone by now will be a new one, even where it comes to lie in the old one's place."""
        self._marks = [
            [None if p.grad is None else mark for p, mark in zip(_parameters(optimizer), marks, strict=False)]
            for optimizer, marks in zip(self._all, self._marks, strict=True)
        ]

    def close(self) -> None:
        """The decision is closed."""
        self._marks = [_marks(optimizer) for optimizer in self._all]

    def _is_unscaled(self, optimizer: Optimizer) -> bool:
        if self._scaler is None:
            return True
        states: Any = self._scaler._per_optimizer_states
        return id(optimizer) in states and states[id(optimizer)]["stage"] is OptState.UNSCALED


def _marks(optimizer: Optimizer) -> _Marks:
    return [None if p.grad is None else (id(p.grad), p.grad._version) for p in _parameters(optimizer)]


def _parameters(optimizer: Optimizer) -> list[Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def judges_for(parts: Parts, count: int) -> list[Judge]:
    """Return the guard's own and others like it, with detectors of their own; budget and states are common to all.

    They are saved and rolled back with the guard. To be called before the first step.
    """
    judges = [parts.judge]
    for number in range(1, count):
        detectors = copy.deepcopy(parts.judge.detectors)
        steady = tuple(filter(sees_every_step, detectors))
        judges.append(replace(parts.judge, detectors=detectors, steady=steady, trial=RollbackTrial(), turns=Turns()))
        named = {f"{DETECTOR}{detector.name} of optimizer {number}": detector for detector in detectors}
        parts.stateful.update(named)
        parts.recovery.take_along(named)
    return judges
