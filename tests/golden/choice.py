"""Which runs of the field are frozen: drawn by a seed from the develop half, over all faces, faults and optimizers."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tests.field.plan import Run, runs

INSPECT = "inspect"
"""The loop that steps by itself and asks `Guard.inspect` first; the field has no such face."""
_SEED = 18
_LONGEST = 1000
_COUNTS = {  # face: healthy runs, faulty runs
    "guard-closure": (4, 6),
    "guard-loss": (3, 5),
    "watch": (4, 6),
    "trainer": (1, 2),
    "lightning": (1, 3),
    "accelerate": (1, 3),
}
_INSPECTED = (1, 3)
_QUICK_TASKS = ("tabular", "vae", "diffusion", "contrastive", "lora", "regression", "gnn")
_QUICK_FACES = ("guard-closure", "guard-loss", "watch", INSPECT)
_QUICK_STEPS = 500


def chosen() -> list[Run]:
    """The runs, healthy ones first within each face."""
    rng = random.Random(_SEED)
    short = [run for run in runs(400, "develop") if run.num_steps <= _LONGEST]
    taken: list[Run] = []
    for face, counts in _COUNTS.items():
        for faulty, count in zip((False, True), counts, strict=True):
            taken += _drawn([run for run in short if run.face == face and bool(run.fault) == faulty], count, taken, rng)
    for faulty, count in zip((False, True), _INSPECTED, strict=True):
        own_loops = [run for run in short if run.face == "watch" and bool(run.fault) == faulty and run not in taken]
        taken += [replace(run, face=INSPECT) for run in _drawn(own_loops, count, taken, rng)]
    return taken


def _drawn(candidates: Sequence[Run], count: int, taken: Sequence[Run], rng: random.Random) -> list[Run]:
    """At random, but what has been drawn least often comes first: faults, then optimizers, then tasks."""
    left, drawn = rng.sample(candidates, len(candidates)), list[Run]()
    while left and len(drawn) < count:
        so_far = [*taken, *drawn]
        seen = {key: Counter(getattr(run, key) for run in so_far) for key in ("fault", "optimizer", "task")}
        best = min(left, key=lambda run: tuple(counts[getattr(run, key)] for key, counts in seen.items()))
        left.remove(best)
        drawn.append(best)
    return drawn


def is_quick(run: Run) -> bool:
    """Belongs to `make test`."""
    short = run.num_steps <= _QUICK_STEPS or run.face == INSPECT
    return run.face in _QUICK_FACES and run.task in _QUICK_TASKS and short
