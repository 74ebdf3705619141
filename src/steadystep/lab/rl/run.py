"""One run of an RL program: a plain loop, or under a guard that observes or acts, perhaps with a planted collapse."""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol, final

from torch import nn

from steadystep._utils.text import quiet_log
from steadystep.config import Config
from steadystep.errors import TrainingHalted
from steadystep.guard import Guard
from steadystep.lab.rl import COLLAPSES, PROGRAMS, Collapse
from steadystep.lab.rl.program import Batch, Numbers, Program
from steadystep.records import Outcome
from steadystep.rl import Controls

Arm = Literal["plain", "observe", "autopilot"]
LOOK_EVERY, SCORED = 10, 4
"""Steps between two evaluations; how many of them are a level."""
_FINAL_SEEDS = (4, 5, 6, 7)  # of the rollouts that the final weights are judged by; a guard plays others


class Trainer(Protocol):
    """One arm of the study."""

    def step(self, program: Program, batch: Batch, metrics: Numbers) -> Outcome | None:
        """Make one update, or decide not to."""
        ...


@final
class Plain:
    """The loop as anybody writes it."""

    def step(self, program: Program, batch: Batch, metrics: Numbers) -> None:
        """Make one update."""
        for optimizer in program.optimizers:
            optimizer.zero_grad()
        program.loss(batch).backward()  # type: ignore[no-untyped-call]
        for optimizer in program.optimizers:
            optimizer.step()


@final
class Guarded:
    """The same update through a guard."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def step(self, program: Program, batch: Batch, metrics: Numbers) -> Outcome:
        """Make one update, or decide not to."""
        return self._guard.step(program.loss, batch=batch, metrics=metrics)


@contextmanager
def _trainer(program: Program, arm: Arm) -> Iterator[Trainer]:
    if arm == "plain":
        yield Plain()
        return
    optimizers = program.optimizers[0] if len(program.optimizers) == 1 else list(program.optimizers)
    with Guard(program.model, optimizers, config=Config(mode=arm)) as guard:
        guard.keep("policy", Controls(evaluate=program.evaluate))
        for name, network in program.kept.items():
            guard.keep(name, network, update=program.move_targets)
        yield Guarded(guard)


@final
class Diary:
    """What was said and done, by step."""

    def __init__(self) -> None:
        self.said: list[list[Any]] = []
        """Step, detector, severity and cause of each finding that is more than a note."""
        self.did: list[list[Any]] = []
        """Step and actions."""

    def note(self, outcome: Outcome | None) -> None:
        """Record one step of a guard."""
        if outcome is None:
            return
        step, cause = outcome.step, str(outcome.diagnosis.cause)
        self.said += [[step, f.detector, f.severity, cause] for f in outcome.findings if f.severity != "info"]
        if outcome.plan.actions:
            self.did.append([step, "+".join(outcome.plan.actions)])


def run_arm(name: str, seed: int, arm: Arm, *, collapse: str = "", num_steps: int = 0) -> dict[str, Any]:
    """Train `name` once and return its row: rewards, findings, actions, a digest of the weights."""
    info = PROGRAMS[name]
    planted = Planted(COLLAPSES[collapse] if collapse else None, seed)
    program, diary, curve, halted = info.make(seed), Diary(), list[list[float]](), ""
    num_steps = num_steps or info.num_steps
    with quiet_log():
        try:
            with _trainer(program, arm) as trainer:
                for step in range(num_steps):
                    planted.at(step, program)
                    batch = program.batch()
                    metrics = program.metrics(batch)
                    if step % LOOK_EVERY == 0:
                        curve.append([step, program.score()])
                        metrics["held_out_reward"] = curve[-1][1]
                    diary.note(trainer.step(program, batch, metrics))
                    program.after_step()
        except TrainingHalted as end:
            halted = str(end)[:200]
    curve.append([num_steps, program.score()])
    return {
        "curve": [[step, round(score, 4)] for step, score in curve],
        "final": final_reward(program),
        "level": final_level([score for _, score in curve], halted=bool(halted)),
        "said": diary.said,
        "did": diary.did,
        "halted": halted,
        "digest": digest(program.model),
        "steps": num_steps,
        "start": planted.start,
        "played": program.played,
    }


@final
class Planted:
    """Makes the changes of a collapse at its step, and takes them back at its end."""

    def __init__(self, collapse: Collapse | None, seed: int) -> None:
        self._collapse, self._before = collapse, dict[str, Any]()
        self.start = -1 if collapse is None else collapse.first_step(seed)

    def at(self, step: int, program: Program) -> None:
        """Change what is due before this step."""
        if self._collapse is None:
            return
        if step == self.start:
            self._before = program.change(self._collapse.changes)
        if self._collapse.lasts and step == self.start + self._collapse.lasts:
            program.change(self._before)


def final_reward(program: Program) -> float:
    """Return what the policy earns that the run is left with; NaN where its weights are lost."""
    if not program.is_finite():
        return math.nan
    return math.fsum(program.rollouts(seed) for seed in _FINAL_SEEDS) / len(_FINAL_SEEDS)


def final_level(scores: list[float], *, halted: bool = False) -> float:
    """Return the mean of the last evaluations, of the weights of 30 steps; of a halted run the last one alone.

    >>> final_level([0.0, 0.5, 0.75, 0.75, 1.0]), final_level([0.0, 1.0], halted=True)
    (0.75, 1.0)
    """
    counted = scores[-1:] if halted else scores[-SCORED:]
    return math.fsum(counted) / len(counted)


def digest(model: nn.Module) -> str:
    """Return a fingerprint of the weights, equal only where every bit is."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()[:16]
