"""The guard as an arm; in observe mode it is the unguarded run, and writes down what the rules are shown."""

from typing import Any, final

from torch.optim import Optimizer

import steadystep
from steadystep.config import Config
from steadystep.errors import TrainingHalted
from steadystep.lab.bench.faulty.trainer import Stopped, Tick, Work
from steadystep.lab.bench.rules import Sample
from steadystep.lab.bench.rules.tensors import measured
from steadystep.lab.tasks import Task
from steadystep.records import Outcome, Signals

LOUD = ("warn", "act", "critical")


def settings(mode: str, precision: str = "fp32") -> Config:
    """As it comes out of the box."""
    return Config.from_mapping({"mode": mode, "training": {"mixed_precision": precision}}, "bench")


@final
class Guarded:
    """A guard around the task's own loop."""

    def __init__(self, task: Task, config: Config, *, record: bool = False) -> None:
        self.model, self.optimizer = task.model, task.optimizer
        self._guard = steadystep.Guard(task.model, task.optimizer, config=config)
        self._inner = (0.0, 0.0, 0.0)
        self._hook = self.optimizer.register_step_pre_hook(self._measure) if record else None

    def step(self, work: Work, batch: Any) -> Tick:
        """A halt is a stop by design."""
        try:
            outcome = self.outcome(work, batch)
        except TrainingHalted as halt:
            raise Stopped(f"halted: {halt.what}") from None
        sample = self.sample(outcome.signals) if self._hook is not None else None
        return Tick(loss=outcome.loss, did=done(outcome), loud=said(outcome), sample=sample)

    def outcome(self, work: Work, batch: Any) -> Outcome:
        """One step of the guard, with all it says."""
        self._inner = (0.0, 0.0, 0.0)
        return self._guard.step(work, batch=batch)

    def sample(self, signals: Signals | None) -> Sample | None:
        """What the rules are shown of this step."""
        if signals is None:
            return None
        unit, coordinate, surprise = self._inner
        return Sample(
            loss=signals.loss,
            norm=signals.grad_norm,
            norms=signals.norms,
            unit=unit,
            coordinate=coordinate,
            surprise=surprise,
        )

    @property
    def updates(self) -> int:
        """Updates contained in the weights."""
        return self._guard.updates

    def close(self) -> None:
        """Let go of the optimizer."""
        if self._hook is not None:
            self._hook.remove()
        self._guard.close()

    def _measure(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._inner = measured(self.model, optimizer)


def done(outcome: Outcome) -> tuple[str, ...]:
    """What was done in a step that was not simply taken; an overflow that the loss scaler refuses counts."""
    if outcome.plan.steps:
        return outcome.plan.steps
    return () if outcome.stepped else ("refused",)


def said(outcome: Outcome) -> str:
    """The first finding that is more than a note, with the cause that was named."""
    loud = [finding for finding in outcome.findings if finding.severity in LOUD]
    return f"{loud[0].detector}: {outcome.diagnosis.cause}" if loud else ""
