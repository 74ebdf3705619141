"""The jobs of detection and recovery: the same run has the same key in both, so it is made once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from steadystep.lab.bench.faulty_arms import Guarded, Plain, Ruled, settings
from steadystep.lab.bench.faulty_run import NUM_STEPS, TRIALS, FaultTrial, Trainer, first_step, run
from steadystep.lab.bench.rules import RULES
from steadystep.lab.bench.study import Choice, Row, StudyJob
from steadystep.lab.tasks import Task

STORE = "faulty-runs"
"""The results file of both studies."""
PARTS = ("faulty/", "healthy/", "rules/")

JUDGE_SEEDS = range(320, 323)
"""Never looked at while anything was chosen; seeds 0 to 9 are for developing."""
RULE_SEEDS = 1
"""So many of the seeds for each rule as an act: there are many rules, and many minutes in each."""
MISSING = 6
"""Clean twins that go without one batch, for each task and seed."""
RULE_ARMS = tuple(info.name for info in RULES.values() if info.does != "log")
QUICK_TRIALS = ("gradients x1e4", "LR x30 for good", "LR +1 % a step")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """How much is run."""

    seeds: tuple[int, ...]
    trials: tuple[FaultTrial, ...]
    tasks: tuple[str, ...] | None = None
    shorter: int = 0
    """Steps that every run is shorter by."""
    missing: int = MISSING

    @classmethod
    def of(cls, choice: Choice) -> "Scope":
        """One task, three faults and one seed when it is to be quick."""
        seeds = choice.pick(full=JUDGE_SEEDS, quick=(0,))
        if choice.quick:
            trials = tuple(TRIALS[name] for name in QUICK_TRIALS)
            return cls(seeds=seeds, trials=trials, tasks=("clusters",), shorter=200, missing=2)
        return cls(seeds=seeds, trials=tuple(TRIALS.values()))

    def places(self) -> Iterator[tuple[FaultTrial, str]]:
        """Every fault on every task that can have it."""
        for trial in self.trials:
            for task in trial.tasks:
                if self.tasks is None or task in self.tasks:
                    yield trial, task


def twins(scope: Scope) -> list[StudyJob]:
    """Runs without a fault: one for each length and precision, and those that miss a batch."""
    jobs: dict[str, StudyJob] = {}
    for seed in scope.seeds:
        for trial, task in scope.places():
            clean = _job(scope, task, seed, "clean", num_steps=trial.num_steps, precision=trial.precision, curve=True)
            found = [clean]
            found += [_job(scope, task, seed, f"missing-{i}", num_steps=NUM_STEPS) for i in range(scope.missing)]
            jobs |= {job.key: job for job in found}
    return list(jobs.values())


def alone(scope: Scope, arm: str, *, seeds: Sequence[int]) -> list[StudyJob]:
    """An arm without any fault: what it costs or brings by itself."""
    tasks = dict.fromkeys(task for _, task in scope.places())
    return [
        _job(scope, task, seed, arm, num_steps=NUM_STEPS) for seed in seeds for task in tasks if _can(arm, task, "fp32")
    ]


def broken(scope: Scope, arm: str, *, seeds: Sequence[int] | None = None) -> list[StudyJob]:
    """Every fault on every task with every seed, in one arm; what the arm cannot do is left out."""
    jobs = []
    for seed in scope.seeds if seeds is None else seeds:
        for trial, task in scope.places():
            if not _can(arm, task, trial.precision):
                continue
            job = _job(
                scope,
                task,
                seed,
                arm,
                num_steps=trial.num_steps,
                trial=trial.name,
                precision=trial.precision,
                curve=trial.slow and arm == "unguarded",
            )
            jobs.append(job)
    return jobs


def _can(arm: str, task: str, precision: str) -> bool:
    """Rules are tried in fp32, and those for Adam where there is one; the guard brings a loss scaler along."""
    if arm in ("unguarded", "careful", "autopilot"):
        return True
    return precision == "fp32" and not (arm in RULES and RULES[arm].only_adam and task == "clusters")


def _job(
    scope: Scope,
    task: str,
    seed: int,
    arm: str,
    *,
    num_steps: int,
    trial: str = "",
    precision: str = "fp32",
    curve: bool = False,
) -> StudyJob:
    length = num_steps - scope.shorter
    args = {"kind": "run", "task": task, "seed": seed, "arm": arm, "trial": trial, "precision": precision}
    return StudyJob(
        key=f"{task}/{seed}/{arm}/{trial}/{precision}/{length}", args=args | {"num_steps": length, "curve": curve}
    )


def make(job: StudyJob) -> Row:
    """One run, whichever it is."""
    args = job.args
    arm, seed, num_steps = args["arm"], args["seed"], args["num_steps"]
    without = (_left_out(arm, seed),) if arm.startswith("missing") else ()
    return run(
        lambda task: trainer(task, arm, num_steps=num_steps, precision=args["precision"]),
        task=args["task"],
        seed=seed,
        num_steps=num_steps,
        trial=args["trial"],
        without=without,
        curve=args["curve"],
    )


def trainer(task: Task, arm: str, *, num_steps: int, precision: str) -> Trainer:
    """The arm of that name."""
    if arm in RULES:
        return Ruled(task, RULES[arm], num_steps=num_steps)
    if arm in ("careful", "autopilot"):
        return Guarded(task, settings(arm, precision))
    if arm == "unguarded" or precision != "fp32":
        return Guarded(task, settings("observe", precision), record=arm == "unguarded" and precision == "fp32")
    return Plain(task)


def _left_out(arm: str, seed: int) -> int:
    """At the fault, soon after it, later, or long before."""
    start = first_step(seed)
    return (start, start + 7, start + 20, start + 60, 50, 120)[int(arm.removeprefix("missing-"))]
