"""Ten tasks, ten seeds, 2,000 steps: every word and act of guard and rules is counted."""

from collections import Counter
from typing import Any

from steadystep.lab.bench.faulty.guarded import LOUD, Guarded, settings
from steadystep.lab.bench.healthy.spikes import SPIKED, spiked
from steadystep.lab.bench.rules import RULES, Rule, Sample
from steadystep.lab.bench.study import Choice, Job, Row
from steadystep.lab.tasks import JUDGED, TASKS
from steadystep.notices import quiet_log
from steadystep.records import Signals

JUDGE_SEEDS = range(320, 330)
NUM_STEPS, NUM_QUICK_STEPS = 2000, 200


def jobs(choice: Choice) -> list[Job]:
    """Every task with every seed."""
    num_steps = NUM_QUICK_STEPS if choice.quick else NUM_STEPS
    return [
        Job(
            key=f"healthy/{task}/{seed}/{num_steps}",
            args={"kind": "healthy", "task": task, "seed": seed, "arm": "autopilot", "num_steps": num_steps},
        )
        for seed in choice.pick(full=JUDGE_SEEDS, quick=(0,))
        for task in (("clusters", "epochs") if choice.quick else JUDGED)
    ]


@quiet_log()
def make(job: Job) -> Row:
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
            acts += bool(outcome.plan.steps) or not outcome.stepped
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


def _alarms(rule: Rule, stream: list[Sample]) -> int:
    return sum(rule.update(sample).alarm for sample in stream)
