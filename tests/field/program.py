"""One training program, made from a run's plan: the same parts for the plain loop and for every face of steadystep."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadystep import Diagnosis, Guard, Outcome
from steadystep.faults import NO_FAULT, Fault
from tests.field import faults
from tests.field.optimizers import OPTIMIZERS
from tests.field.plan import Run
from tests.field.schedules import SCHEDULES, Rate
from tests.field.tasks import TASKS, Player, Task


@dataclass(slots=True, kw_only=True)
class Seat:
    """A player with its optimizer, learning rate and fault."""

    player: Player
    optimizer: Optimizer
    rate: Rate
    fault: Fault


@dataclass(slots=True, kw_only=True)
class Program:
    """What a loop needs."""

    run: Run
    task: Task
    seats: list[Seat]
    start: float
    """The score of the untrained weights."""

    @classmethod
    def of(cls, run: Run) -> "Program":
        """Everything new, from the run's seed."""
        task = TASKS[run.task](run.seed)
        seats = []
        hit = run.seed % len(task.players)
        for number, player in enumerate(task.players):
            optimizer = OPTIMIZERS[run.optimizer].on(type(task), player.model.parameters())
            rate = SCHEDULES[run.schedule].make(optimizer, run.num_steps)
            fault = NO_FAULT
            if number == hit:
                fault = faults.made(run.fault, task, player.model, optimizer, seed=run.seed, at=run.fault_at)
            seats.append(Seat(player=player, optimizer=optimizer, rate=rate, fault=fault))
        return cls(run=run, task=task, seats=seats, start=task.held_out())

    def weights(self) -> dict[str, Tensor]:
        """Every tensor of every model."""
        models = [seat.player.model for seat in self.seats]
        return {f"{i}.{k}": v.detach().clone() for i, m in enumerate(models) for k, v in m.state_dict().items()}


@dataclass(slots=True)
class Notes:
    """What a guarded run was told, step by step. Only what a user can see: outcomes and `diagnose()`."""

    warnings: list[dict[str, Any]] = field(default_factory=list)
    acts: list[dict[str, Any]] = field(default_factory=list)
    steps: int = 0
    guards: list[Guard] = field(default_factory=list)
    _last: dict[int, Outcome] = field(default_factory=dict)

    def add(self, outcome: Outcome | None, who: int = 0) -> None:
        """Take one outcome in; the same one twice counts once."""
        if outcome is None or outcome.pending or outcome is self._last.get(who):
            return
        self._last[who] = outcome
        self.steps += 1
        for finding in outcome.findings:
            if finding.severity != "info":
                self.warnings.append(
                    {"step": finding.step, "detector": finding.detector, "severity": finding.severity, "who": who}
                )
        if not outcome.plan.proceeds:
            plan = list(outcome.plan.actions)
            self.acts.append({"step": outcome.step, "plan": plan, "cause": outcome.diagnosis.cause, "who": who})

    def diagnosed(self) -> Diagnosis:
        """The first cause of the first guard that has one."""
        firsts = [guard.diagnose()[0] for guard in self.guards]
        return next((found for found in firsts if not found.cause.startswith("healthy")), firsts[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a run ended."""

    weights: dict[str, Tensor]
    score: float
    """NaN for a run that stopped or whose weights are not finite."""
    start: float
    error: str = ""
    notes: Notes | None = None

    def same_weights(self, other: "End") -> bool:
        """Bit for bit, NaN equal to NaN."""
        return self.weights.keys() == other.weights.keys() and all(
            torch.equal(a, b) or _same_bits(a, b)
            for a, b in zip(self.weights.values(), other.weights.values(), strict=True)
        )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.is_floating_point() and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def ended(program: Program, *, error: str = "", notes: Notes | None = None) -> End:
    """Score what a loop left behind."""
    weights = program.weights()
    finite = all(bool(value.isfinite().all()) for value in weights.values() if value.is_floating_point())
    score = program.task.held_out() if finite and not error else math.nan
    return End(weights=weights, score=score, start=program.start, error=error, notes=notes)
