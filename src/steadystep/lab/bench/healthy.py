"""Ten tasks, ten seeds, 2,000 steps: every word and act of guard and rules is counted."""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from steadystep._utils.text import quiet_log
from steadystep.config import Config
from steadystep.detectors import Detector
from steadystep.detectors.build import build_detectors
from steadystep.lab.bench.faulty_arms import Guarded, settings
from steadystep.lab.bench.rival_rules import RULES, RivalRule, Sample
from steadystep.lab.bench.study import Choice, Row, StudyJob
from steadystep.lab.tasks import JUDGED, TASKS
from steadystep.records import LOUD, Signals

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


HEALTHY_SEEDS = range(320, 330)
NUM_STEPS, NUM_QUICK_STEPS = 2000, 200


def jobs(choice: Choice) -> list[StudyJob]:
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
def make(job: StudyJob) -> Row:
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
