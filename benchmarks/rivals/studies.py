"""The recovery and overhead studies for real packages: same tasks, same faults, same seeds, same clock."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rivals.adapters import RIVALS, Rival
from steadystep.lab.bench import faulty_jobs as faulty
from steadystep.lab.bench import overhead
from steadystep.lab.bench.faulty_run import run
from steadystep.lab.bench.overhead_steps import Setup, TimedStep, adamw
from steadystep.lab.bench.study import Choice, Row, Study, StudyJob
from steadystep.lab.tasks import Task

TIMED = ("arc-training", "stabilityguard", "zclip")
"""Those that stand beside a training loop, as the guard does."""


@cache
def _by_name() -> dict[str, Rival]:
    return {rival.name: rival for rival in RIVALS}


def _recovery_jobs(choice: Choice) -> list[StudyJob]:
    scope = faulty.Scope.of(choice)
    few = scope.seeds[: faulty.RULE_SEEDS]
    jobs = [
        job
        for name in _by_name()
        for job in (*faulty.alone(scope, name, seeds=few), *faulty.broken(scope, name, seeds=few))
    ]
    return [job for job in jobs if not (_by_name()[job.args["arm"]].only_adam and job.args["task"] == "clusters")]


def _recovery_run(job: StudyJob) -> Row:
    args = job.args
    rival = _by_name()[args["arm"]]
    return run(rival.make, task=args["task"], seed=args["seed"], num_steps=args["num_steps"], trial=args["trial"])


def _overhead_jobs(choice: Choice) -> list[StudyJob]:
    names = [name for name, rival in _by_name().items() if rival.package in TIMED]
    return [job for name in names for job in overhead.jobs(name, quick=choice.quick)]


def _overhead_run(job: StudyJob) -> Row:
    return overhead.measured(job, _stepper(_by_name()[job.args["who"]]))


def _stepper(rival: Rival) -> Callable[[Setup], TimedStep]:
    def make(setup: Setup) -> TimedStep:
        model, compute = setup
        task = Task(
            model=model,
            optimizer=adamw(setup),
            batch=lambda: None,
            loss=lambda batch: compute(),
            held_out=lambda: 0.0,
        )
        loop = rival.make(task)
        return lambda: loop.step(task.loss, None).loss

    return make


def _untold(rows: Any) -> Any:
    return f"{len(rows)} rows; steadystep bench recovery and overhead show them beside their own"


def _summary(rows: Any) -> dict[str, Any]:
    return {"rows": len(rows), "torch": torch.__version__}


STUDIES = {
    "recovery": Study(
        name="rivals",
        about="recovery with real packages",
        jobs=_recovery_jobs,
        run=_recovery_run,
        table=_untold,
        summary=_summary,
        parts=faulty.PARTS,
    ),
    "overhead": Study(
        name="rivals-overhead",
        about="overhead of real packages",
        jobs=_overhead_jobs,
        run=_overhead_run,
        table=_untold,
        summary=_summary,
        alone=True,
        parts=("overhead",),
    ),
}

RESULTS = Path(__file__).parent.parent / "results"
