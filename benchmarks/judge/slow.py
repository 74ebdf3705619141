"""Slow divergence: when was it noticed, and what had it cost by then?

The cost is the held-out loss (with the drift, where the loss itself drifts) less the best so far in the run. Beside it:
the mean of the last 20 training losses less the lowest such mean, which noise alone raises to .05 to .12 here; and the
distance to a twin without the fault on the same batches, which also counts what the twin has learned meanwhile.
"""

import math
from typing import Any

import torch

from judge.catalogue import SLOW, first_step
from judge.jobs import Job, Row
from judge.table import show
from judge.training import LOUD, Run, guarded_run, plain_run
from steadystep.lab.tasks import TASKS

LIMIT = 0.2
"""Nats."""
_WINDOW, _EVERY = 20, 10


def jobs(seeds: list[int], tasks: list[str]) -> list[Job]:
    """400 steps with the fault."""
    return [
        Job(study="slow", task=task, seed=seed, num_steps=first_step(seed) + 400, fault=name)
        for name in SLOW
        for task in ("gpt", "clusters")
        if task in tasks
        for seed in seeds
    ]


def run(job: Job) -> Row:
    """A guarded run with the fault and a plain one without."""
    start = first_step(job.seed)
    task = TASKS[job.task].make(job.seed)
    fault = SLOW[job.fault].make(task, job.seed)
    seen: dict[int, float] = {}

    def look(step: int) -> None:
        if step >= start - _EVERY and step % _EVERY == 0:
            seen[step] = fault.loss(step, torch.tensor(task.held_out(), dtype=torch.float64)).item()

    done = guarded_run(task, num_steps=job.num_steps, fault=fault, after=look)
    twin = plain_run(TASKS[job.task].make(job.seed), num_steps=job.num_steps)
    loud = [f for f in done.findings if f[2] in LOUD and f[0] >= start]
    first = loud[0] if loud else None
    at = first[0] if first else len(done.losses) - 1
    return {
        "first": first,
        "false_alarms": sum(f[2] in LOUD and f[0] < start for f in done.findings),
        "after": at - start if first else None,
        "cost": _held_out_above_best(seen, at),
        "smoothed": above_best(done, at),
        "paired": _above_twin(done, twin, at),
        "plans": done.plans[:50],
        "halted": done.halted,
        "ratio": done.held_out / twin.held_out,
    }


def _held_out_above_best(seen: dict[int, float], at: int) -> float:
    """What a fresh batch would lose at the time, less the best it would have lost before."""
    before = [loss for step, loss in seen.items() if step <= at]
    return before[-1] - min(before)


def above_best(run: Run, at: int) -> float:
    """Mean of the last 20 losses less the lowest such mean so far."""
    means = _means(run.losses[: at + 1])
    return means[-1] - min(means) if all(math.isfinite(m) for m in means) else math.inf


def _above_twin(run: Run, twin: Run, at: int) -> float:
    """The same on the same batches, less the twin's: free of the noise that both share."""
    return _means([a - b for a, b in zip(run.losses[: at + 1], twin.losses[: at + 1], strict=True)])[-1]


def _means(losses: list[float]) -> list[float]:
    return [sum(losses[max(0, i - _WINDOW + 1) : i + 1]) / min(i + 1, _WINDOW) for i in range(len(losses))]


def report(rows: list[Row]) -> dict[str, Any]:
    """One line per fault and task; returns the lines."""
    lines: list[dict[str, Any]] = []
    for fault, name in dict.fromkeys((r["fault"], r["task"]) for r in rows):
        mine = [r for r in rows if (r["fault"], r["task"]) == (fault, name)]
        noticed = [r for r in mine if r["first"]]
        costs = sorted(r["cost"] for r in noticed) or [math.nan]
        smoothed = sorted(r["smoothed"] for r in noticed) or [math.nan]
        paired = sorted(r["paired"] for r in noticed) or [math.nan]
        lines.append(
            {
                "fault": fault,
                "task": name,
                "runs": len(mine),
                "noticed": len(noticed),
                f"before {LIMIT}": sum(r["cost"] < LIMIT for r in noticed),
                "median cost": costs[len(costs) // 2],
                "worst": costs[-1],
                "smoothed": smoothed[len(smoothed) // 2],
                "above twin": paired[len(paired) // 2],
                "steps after": ", ".join(str(r["after"]) for r in mine),
                "by": ", ".join(sorted({r["first"][1] for r in noticed})),
                "false": sum(r["false_alarms"] for r in mine),
                "halted": sum(bool(r["halted"]) for r in mine),
            }
        )
    show("Slow divergence", list(lines[0]), [list(line.values()) for line in lines])
    return {"lines": lines}
