"""Faults: the held-out loss of a guarded run against twins without the fault, and what the guard did."""

from collections.abc import Callable
from typing import Any

import torch

from judge.catalogue import FAULTS, first_step
from judge.jobs import Job, Row
from judge.table import show
from judge.training import LOUD, guarded_run, plain_run
from steadystep.lab.tasks import TASKS

NUM_STEPS = 600
_VARIANTS = 3


def rows(seeds: list[int], names: list[str], tasks: list[str], results: Callable[[list[Job]], list[Row]]) -> list[Row]:
    """All four arms; how many batches the fourth goes without is only known after the second."""
    pairs = [(name, task) for name in names for task in FAULTS[name].tasks if task in tasks]

    def job(task: str, seed: int, fault: str, arm: str, missing: int = 0) -> Job:
        return Job(study="faults", task=task, seed=seed, num_steps=NUM_STEPS, fault=fault, arm=arm, missing=missing)

    clean = [job(task, seed, "", "clean") for task in dict.fromkeys(task for _, task in pairs) for seed in seeds]
    broken = [job(task, seed, name, arm) for name, task in pairs for seed in seeds for arm in ("guarded", "faulty")]
    found = results(clean + broken)
    lost = {
        (row["task"], row["seed"], row["lost"])
        for row in found
        if row["arm"] == "guarded" and 0 < row["lost"] <= NUM_STEPS // 2  # who lost more has no excuse
    }
    twins = [job(t, s, "", f"missing-{i}", n) for t, s, n in sorted(lost) for i in range(_VARIANTS)]
    return found + results(twins)


def run(job: Job) -> Row:
    """One run of one arm."""
    task = TASKS[job.task].make(job.seed)
    user_lr = float(task.optimizer.param_groups[0]["lr"])
    if job.arm == "clean" or job.arm.startswith("missing"):
        done = plain_run(task, num_steps=job.num_steps, without=_left_out(job))
    else:
        fault = FAULTS[job.fault].make(task, job.seed)
        done = (guarded_run if job.arm == "guarded" else plain_run)(task, num_steps=job.num_steps, fault=fault)
    loud = [f for f in done.findings if f[2] in LOUD]
    return {
        "held_out": done.held_out,
        "lost": job.num_steps - done.updates,
        "lr_kept": done.final_lr == user_lr,
        "causes": done.causes,
        "plans": done.plans[:50],
        "first_plan": done.plans[0][0] if done.plans else None,
        "first_finding": loud[0] if loud else None,
        "halted": done.halted,
    }


def _left_out(job: Job) -> set[int]:
    """Directly at the fault, anywhere, or anywhere after it."""
    start = first_step(job.seed)
    if job.arm == "missing-0":
        return set(range(start, start + job.missing))
    rng = torch.Generator().manual_seed(1000 + job.seed)
    low = 0 if job.arm == "missing-1" else start
    order: list[int] = (torch.randperm(job.num_steps - low, generator=rng) + low).tolist()
    return set(order[: job.missing])


def report(rows: list[Row]) -> dict[str, Any]:
    """One line per fault and task; returns the lines."""
    clean = {(r["task"], r["seed"]): r["held_out"] for r in rows if r["arm"] == "clean"}
    faulty = {(r["task"], r["fault"], r["seed"]): r["held_out"] for r in rows if r["arm"] == "faulty"}
    spread: dict[tuple[str, int, int], float] = {}
    for r in rows:
        if r["arm"].startswith("missing"):
            key = (r["task"], r["seed"], r["missing"])
            spread[key] = max(spread.get(key, 0.0), r["held_out"] / clean[r["task"], r["seed"]])
    lines: list[dict[str, Any]] = []
    guarded = [r for r in rows if r["arm"] == "guarded"]
    for fault, name in dict.fromkeys((r["fault"], r["task"]) for r in guarded):
        mine = [r for r in guarded if (r["fault"], r["task"]) == (fault, name)]
        ratios = [r["held_out"] / clean[name, r["seed"]] for r in mine]
        bar = FAULTS[fault].bar
        limits = [max(bar or 0.0, spread.get((name, r["seed"], r["lost"]), 0.0)) for r in mine]
        causes: dict[str, int] = {}
        for r in mine:
            for cause in r["causes"]:
                causes[cause] = causes.get(cause, 0) + 1
        unguarded = sorted(faulty[name, fault, r["seed"]] / clean[name, r["seed"]] for r in mine)
        lines.append(
            {
                "fault": fault,
                "task": name,
                "runs": len(mine),
                "median": sorted(ratios)[len(ratios) // 2],
                "worst": max(ratios, key=lambda ratio: (ratio != ratio, ratio)),
                "unguarded": unguarded[len(unguarded) // 2],
                "within": "-" if bar is None else sum(r <= x for r, x in zip(ratios, limits, strict=True)),
                "lost": max(r["lost"] for r in mine),
                "lr kept": sum(r["lr_kept"] for r in mine),
                "halted": sum(bool(r["halted"]) for r in mine),
                "causes": ", ".join(f"{cause} {n}" for cause, n in causes.items()) or "none",
            }
        )
    if lines:
        show("Held-out loss over the fault-free twin's", list(lines[0]), [list(line.values()) for line in lines])
    return {"lines": lines}
