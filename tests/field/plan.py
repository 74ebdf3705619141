"""Which runs there are: drawn from the index alone, so that run 17 is the same run on every machine."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from tests.field.faults import FAULTS, first_step
from tests.field.optimizers import OPTIMIZERS
from tests.field.schedules import SCHEDULES
from tests.field.tasks import TASKS

Half = Literal["develop", "sealed", "both"]
FACES = ("guard-closure", "guard-loss", "watch", "trainer", "lightning", "accelerate")
FRAMEWORKS = ("trainer", "lightning", "accelerate")
FAULTY_SHARE = 0.35
_FACE_WEIGHTS = (4, 3, 4, 2, 2, 2)  # frameworks take supervised tasks only, and longer
_LENGTHS = (300, 300, 500, 500, 800, 800, 800, 800, 1000, 1000, 1500, 3000)
_PLAN = 20261
FIRST_COUNTED = 10_000
"""Indices from here on serve to count false alarms, and are run for nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training program, to be run with and without steadystep."""

    index: int
    task: str
    schedule: str
    optimizer: str
    face: str
    seed: int
    num_steps: int
    fault: str | None = None

    @property
    def half(self) -> str:
        return "sealed" if self.index % 2 else "develop"

    @property
    def fault_at(self) -> int:
        return first_step(self.seed, self.num_steps)

    def clean(self, seed: int | None = None) -> "Run":
        """The plain program without a fault, and perhaps with another seed."""
        return replace(self, fault=None, seed=self.seed if seed is None else seed)


def runs(count: int, half: Half = "both") -> Iterator[Run]:
    """The runs of the first `count` indices that belong to `half`: even ones develop, odd ones are sealed."""
    for index in range(count):
        run = run_of(index)
        if half in ("both", run.half):
            yield run


def healthy_runs(num_steps: int) -> Iterator[Run]:
    """Healthy runs that no other command draws, until they have `num_steps` steps together."""
    index, total = FIRST_COUNTED, 0
    while total < num_steps:
        run = run_of(index)
        index += 1
        if run.fault is None:
            total += run.num_steps
            yield run


def run_of(index: int) -> Run:
    """The run of one index."""
    rng = random.Random(f"{_PLAN}/{index}")
    face = rng.choices(FACES, _FACE_WEIGHTS)[0]
    while True:
        run = Run(
            index=index,
            task=rng.choice(list(TASKS)),
            schedule=rng.choice(list(SCHEDULES)),
            optimizer=rng.choice(list(OPTIMIZERS)),
            face=face,
            seed=rng.randrange(1000),
            num_steps=rng.choice(_LENGTHS),
            fault=rng.choice(list(FAULTS)) if rng.random() < FAULTY_SHARE else None,
        )
        if possible(run):
            return run


def possible(run: Run) -> bool:
    """Whether somebody could write this program."""
    task, schedule = TASKS[run.task], SCHEDULES[run.schedule]
    if run.optimizer in task.unsuited:
        return False
    if run.face in FRAMEWORKS and (task.interactive or schedule.owned):
        return False
    if run.face == "watch" and schedule.owned and run.schedule != "own-cosine":  # watch() takes settings only
        return False
    if schedule.validates and (task.higher_is_better or not task.learning_judged):
        return False
    # why: a guard that sets the rate itself overwrites whatever the fault has set
    return not (run.fault == "lr-100-for-20" and schedule.owned)
