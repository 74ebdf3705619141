"""The arms of the studies: the guard, nothing, and the rules of others; and healthy runs of the guard.

In observe mode the guard is the unguarded run, and writes down what the rules are shown. Healthy: ten tasks, ten seeds,
2,000 steps, in which every word and act of guard and rules is counted.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

import steadystep
from steadystep._utils.text import quiet_log
from steadystep.config import Config
from steadystep.detectors import Detector
from steadystep.detectors.build import build_detectors
from steadystep.errors import TrainingHalted
from steadystep.lab.bench.faulty_run import BatchLoss, Stopped, Tick
from steadystep.lab.bench.rival_rule import measured, one_group_each
from steadystep.lab.bench.rival_rules import RULES, RivalRule, RuleAlarm, RuleInfo, Sample
from steadystep.lab.bench.study import Choice, Row, StudyJob
from steadystep.lab.tasks import JUDGED, TASKS, Task
from steadystep.records import LOUD, Outcome, Signals


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

    def step(self, work: BatchLoss, batch: Any) -> Tick:
        """A halt is a stop by design."""
        try:
            outcome = self.outcome(work, batch)
        except TrainingHalted as halt:
            raise Stopped(f"halted: {halt.what}") from None
        sample = self.sample(outcome.signals) if self._hook is not None else None
        return Tick(loss=outcome.loss, did=done(outcome), loud=said(outcome), sample=sample)

    def outcome(self, work: BatchLoss, batch: Any) -> Outcome:
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
    if outcome.plan.actions:
        return outcome.plan.actions
    return () if outcome.stepped else ("refused",)


def said(outcome: Outcome) -> str:
    """The first finding that is more than a note, with the cause that was named."""
    loud = [finding for finding in outcome.findings if finding.severity in LOUD]
    return f"{loud[0].detector}: {outcome.diagnosis.cause}" if loud else ""


@final
class Plain:
    """Nothing but forward, backward, update."""

    def __init__(self, task: Task) -> None:
        self.model, self.optimizer = task.model, task.optimizer
        self.updates = 0

    def step(self, work: BatchLoss, batch: Any) -> Tick:
        """Takes whatever comes."""
        self.optimizer.zero_grad()
        loss = work(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.updates += 1
        return Tick(loss=loss.item())  # sync: as everybody does

    def close(self) -> None:
        """Nothing to do."""


@final
class Ruled:
    """The same with a rule between backward and update."""

    def __init__(self, task: Task, info: RuleInfo, *, num_steps: int) -> None:
        self.model, self.optimizer = task.model, task.optimizer
        self.updates = 0
        self._rule = info.make(num_steps)
        self._touch = info.touch() if info.touch is not None else None
        self._step = 0
        if info.each_tensor:
            one_group_each(self.optimizer)

    def step(self, work: BatchLoss, batch: Any) -> Tick:
        """A rule that stops does so after the update, as its original."""
        self.optimizer.zero_grad()
        loss = work(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        verdict = RuleAlarm()
        if self._touch is not None:
            self._touch(self.model, self.optimizer, self._step)
            seen = loss.item()  # sync: as everybody does
        else:
            each = torch.stack(torch._foreach_norm(grads))
            seen, total, *norms = torch.cat([torch.stack([loss.detach(), each.norm()]), each]).tolist()  # sync: rule
            verdict = self._rule.update(Sample(loss=seen, norm=total, norms=tuple(norms)))
        did = self._carry_out(verdict, grads)
        for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = lr
        self._step += 1
        if verdict.stop:
            raise Stopped("the rule ends the run")
        return Tick(loss=seen, did=did)

    def _carry_out(self, verdict: RuleAlarm, grads: list[Tensor]) -> tuple[str, ...]:
        if verdict.alarm and verdict.scale == 0.0:
            times_zero(self)
            return ("skip",)
        if verdict.scales:
            for grad, scale in zip(grads, verdict.scales, strict=True):
                grad.mul_(scale)
        elif verdict.scale != 1.0:
            for grad in grads:
                grad.mul_(verdict.scale)
        self.optimizer.step()
        self.updates += 1
        return ()

    def close(self) -> None:
        """Nothing to do."""


@torch.no_grad()
def times_zero(trainer: Plain | Ruled) -> None:
    """An update multiplied by zero: nothing moves, except that 0 · NaN is NaN, in weights and in moments."""
    for p in trainer.model.parameters():
        if p.grad is not None:
            nothing = p.grad * 0.0
            p.add_(nothing)
            for name, value in trainer.optimizer.state.get(p, {}).items():
                if name in ("exp_avg", "exp_avg_sq", "momentum_buffer") and value is not None:
                    value.add_(nothing)


SPIKED = ("gpt", "clusters", "regression", "rnn", "autoencoder", "epochs")
"""Tasks whose loss is above zero, so that a multiple of it means something."""
FACTORS = (1.5, 2.0, 5.0)
SPIKED_PARTS = ("loss", "gradient", "both")
TRIED = 8
"""Steps of each run."""


def spiked(stream: Sequence[Sample], signals: Sequence[Signals], num_steps: int) -> dict[str, dict[str, int]]:
    """How often each spoke: {"loss x2": {"tried": 8, "steadystep": 1, "notes": 5, "ZClip": 0, …}, …}."""
    # why: the rules that look into tensors would have to be measured again
    rules = {name: info.make(num_steps) for name, info in RULES.items() if info.does != "touch"}
    watch = build_detectors(Config())
    places = {len(stream) * (2 + i) // (TRIED + 2) for i in range(TRIED)}
    found: dict[str, dict[str, int]] = {}
    for step, (sample, seen) in enumerate(zip(stream, signals, strict=True)):
        if step in places:
            for part in SPIKED_PARTS:
                for factor in FACTORS:
                    loss = factor if part != "gradient" else 1.0
                    grad = factor if part != "loss" else 1.0
                    counts = found.setdefault(f"{part} x{factor:g}", {"tried": 0, "steadystep": 0, "notes": 0})
                    counts["tried"] += 1
                    _try_rules(rules, _larger(sample, loss, grad), counts)
                    _try_detectors(watch, _larger_signals(seen, loss, grad), counts)
        for rule in rules.values():
            rule.update(sample)
        for detector in watch:
            detector.update(seen)
    return found


def _try_rules(rules: dict[str, RivalRule], sample: Sample, counts: dict[str, int]) -> None:
    for name, rule in rules.items():
        counts[name] = counts.get(name, 0) + copy.deepcopy(rule).update(sample).alarm


def _try_detectors(watch: Sequence[Detector], seen: Signals, counts: dict[str, int]) -> None:
    found = [finding.severity for detector in watch for finding in copy.deepcopy(detector).update(seen)]
    counts["steadystep"] += any(severity in LOUD for severity in found)
    counts["notes"] += bool(found)


def _larger(sample: Sample, loss: float, grad: float) -> Sample:
    return replace(
        sample, loss=sample.loss * loss, norm=sample.norm * grad, norms=tuple(norm * grad for norm in sample.norms)
    )


def _larger_signals(seen: Signals, loss: float, grad: float) -> Signals:
    return replace(
        seen,
        loss=seen.loss * loss,
        losses=tuple(value * loss for value in seen.losses),
        grad_norm=seen.grad_norm * grad,
        norms=tuple(norm * grad for norm in seen.norms),
    )


HEALTHY_SEEDS = range(903, 913)
NUM_STEPS, NUM_QUICK_STEPS = 2000, 200


def healthy_jobs(choice: Choice) -> list[StudyJob]:
    """Every task with every seed."""
    num_steps = NUM_QUICK_STEPS if choice.quick else NUM_STEPS
    return [
        StudyJob(
            key=f"healthy/{task}/{seed}/{num_steps}",
            args={"kind": "healthy", "task": task, "seed": seed, "arm": "autopilot", "num_steps": num_steps},
        )
        for seed in choice.pick(full=HEALTHY_SEEDS, quick=(0,))
        for task in (("clusters", "epochs") if choice.quick else JUDGED)
    ]


@quiet_log()
def make_healthy(job: StudyJob) -> Row:
    """One run under the guard, whose stream every rule gets too."""
    task, num_steps = TASKS[job.args["task"]].make(job.args["seed"]), job.args["num_steps"]
    guarded = Guarded(task, settings("autopilot"), record=True)
    stream: list[Sample] = []
    signals: list[Signals] = []
    warnings, acts, said = 0, 0, Counter[str]()
    try:
        for _ in range(num_steps):
            outcome = guarded.outcome(task.loss, task.batch())
            task.after_step()
            loud = {f"{f.detector} {f.severity}" for f in outcome.findings if f.severity in LOUD}
            warnings += bool(loud)
            acts += bool(outcome.plan.actions) or not outcome.stepped
            said.update(loud)
            sample = guarded.sample(outcome.signals)
            if sample is not None and outcome.signals is not None:
                stream.append(sample)
                signals.append(outcome.signals)
    finally:
        guarded.close()
    adam = "betas" in task.optimizer.defaults
    made = {name: info.make(num_steps) for name, info in RULES.items() if adam or not info.only_adam}
    row: dict[str, Any] = {
        "steps": len(stream),
        "warnings": warnings,
        "acts": acts,
        "said": dict(said),
        "alarms": {name: _alarms(rule, stream) for name, rule in made.items()},
    }
    return row | {"spikes": spiked(stream, signals, num_steps) if job.args["task"] in SPIKED else {}}


def _alarms(rule: RivalRule, stream: list[Sample]) -> int:
    return sum(rule.update(sample).alarm for sample in stream)
