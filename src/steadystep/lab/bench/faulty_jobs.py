"""The jobs of detection and recovery, and what their rows say together: who was harmed, and who spoke in time.

The same run has the same key in both studies, so it is made once.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

from steadystep.lab.bench.faulty_arms import Guarded, Plain, Ruled, settings
from steadystep.lab.bench.faulty_run import (
    EVERY,
    NATS,
    NUM_STEPS,
    SCORED,
    TRIALS,
    FaultTrial,
    Trainer,
    first_step,
    run,
)
from steadystep.lab.bench.rival_rules import RULES
from steadystep.lab.bench.study import Choice, Row, StudyJob
from steadystep.lab.tasks import Task

STORE = "faulty-runs"
"""The results file of both studies."""
PARTS = ("faulty_", "rival_rule")

JUDGE_SEEDS = range(903, 906)
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


AT_LEAST = 1.01
"""Within one per cent is never harm, however little the twins differ."""
SLOW_COST = 0.2
"""Nats that a slow divergence may cost before it is too late."""


@final
class Twins:
    """Runs without a fault, to compare with."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._clean: dict[Any, Row] = {}
        missing: list[Row] = []
        for row in rows:
            if row["arm"] == "clean":
                self._clean[self._key(row)] = row
            elif row["arm"].startswith("missing"):
                missing.append(row)
        self._limits: dict[str, float] = defaultdict(lambda: AT_LEAST)
        for row in missing:
            ratio = self.ratio(row)
            if ratio == ratio:
                self._limits[row["task"]] = max(self._limits[row["task"]], ratio)

    def has(self, row: Row) -> bool:
        """Whether there is a run without a fault to compare this one with."""
        return self._key(row) in self._clean

    def ratio(self, row: Row) -> float:
        """Its score over that of the same run without the fault; NaN where it has none."""
        clean = self._clean.get(self._key(row))
        return math.nan if clean is None else float(row["score"]) / float(clean["score"])

    def limit(self, task: str) -> float:
        """The worst of the clean twins that miss one batch, of all seeds of the task; 1.01 at least."""
        return self._limits[task]

    def fine(self, row: Row) -> bool:
        """It came through: to its last step, finite, and no worse than a clean run that misses a batch."""
        return self.ratio(row) <= self.limit(row["task"])  # NaN is not

    def fine_but_for_lost(self, row: Row) -> bool:
        """As `fine`, beside what the twin was when it had seen as few updates: the lost steps are all it lacks."""
        clean = self._clean.get(self._key(row))
        if clean is None:
            return False
        last = row["num_steps"] - 1 - row["lost"]
        then = [loss for step, loss in clean["curve"].items() if last - SCORED * EVERY < int(step) <= last]
        if not then:  # before the curve begins
            return False
        baseline: float = max(sum(then) / len(then), float(clean["score"]))
        return float(row["score"]) <= self.limit(row["task"]) * baseline

    def lead(self, row: Row, noticed: int | None, *, than: Literal["best", "twin"]) -> float | None:
        """Steps between a word and 0.2 nats of damage; negative when it came too late, None when there was no damage.

        Damage is how far the held-out loss is above its own best so far, or above the twin's at the same step, which
        also counts what the twin has learned meanwhile.
        """
        clean = self._clean.get(self._key(row))
        if clean is None or row["task"] not in NATS:
            return None
        best = math.inf
        for step, loss in sorted((int(step), loss) for step, loss in row["curve"].items()):
            best = min(best, loss)
            baseline = best if than == "best" else clean["curve"].get(str(step), math.inf)
            if not loss - baseline < SLOW_COST:
                return float(step - (row["num_steps"] if noticed is None else noticed))
        return None

    @staticmethod
    def _key(row: Row) -> tuple[Any, ...]:
        return row["task"], row["seed"], row["num_steps"], row["precision"]


def is_slow(row: Row) -> bool:
    """One of the creeping faults."""
    return bool(row["trial"]) and TRIALS[row["trial"]].slow


def identity(row: Row) -> tuple[Any, ...]:
    """The same broken run in every arm."""
    return row["trial"], row["task"], row["seed"], row["num_steps"]


def median(values: Sequence[float]) -> float:
    """NaN counts as the largest; of nothing it is NaN."""
    ordered = sorted(values, key=lambda value: (value != value, value))
    return ordered[(len(ordered) - 1) // 2] if ordered else math.nan


def worst(values: Sequence[float]) -> float:
    """NaN, if there is one."""
    return max(values, key=lambda value: (value != value, value), default=math.nan)
