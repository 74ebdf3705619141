"""Healthy runs: what does the guard do where nothing is wrong? Wanted: nothing."""

from collections import Counter
from typing import Any

from judge.jobs import Job, Row
from judge.table import show
from judge.training import LOUD, guarded_run, plain_run
from steadystep.lab.tasks import TASKS


def jobs(tasks: list[str], seeds: list[int], num_steps: int | None) -> list[Job]:
    """Every task with every seed, and the first seed once more without a guard."""
    return [
        Job(study="healthy", task=name, seed=seed, num_steps=num_steps or TASKS[name].num_steps, arm=arm)
        for name in tasks
        for seed in seeds
        for arm in (("guarded", "clean") if seed == seeds[0] else ("guarded",))
    ]


def run(job: Job) -> Row:
    """One run, with all that was said and done in it."""
    task = TASKS[job.task].make(job.seed)
    done = (plain_run if job.arm == "clean" else guarded_run)(task, num_steps=job.num_steps)
    return {
        "steps": len(done.losses),
        "findings": [f for f in done.findings if f[2] in LOUD],
        "num_info": sum(f[2] == "info" for f in done.findings),
        "plans": done.plans,
        "halted": done.halted,
        "held_out": done.held_out,
        "weights": done.weights,
    }


def report(rows: list[Row]) -> dict[str, Any]:
    """Tables by task and by detector; returns the totals."""
    plain = {(row["task"], row["seed"]): row for row in rows if row["arm"] == "clean"}
    guarded = [row for row in rows if row["arm"] == "guarded"]
    table = []
    for name in dict.fromkeys(row["task"] for row in guarded):
        mine = [row for row in guarded if row["task"] == name]
        twins = [(row, plain[key]) for row in mine if (key := (row["task"], row["seed"])) in plain]
        same = all(row["weights"] == twin["weights"] for row, twin in twins if not row["plans"])
        held = [not row["plans"] for row, _ in twins]
        table.append(
            [
                name,
                len(mine),
                sum(row["steps"] for row in mine),
                sum(len(row["plans"]) for row in mine),
                *(_per_10k(mine, severity) for severity in LOUD),
                sum(row["num_info"] for row in mine) * 1e4 / sum(row["steps"] for row in mine),
                sum(bool(row["halted"]) for row in mine),
                "yes" if same and any(held) else "no" if not same else "-",
            ]
        )
    head = [
        "task",
        "runs",
        "steps",
        "interventions",
        *(f"{s}/10k" for s in LOUD),
        "info/10k",
        "halted",
        "bit-identical",
    ]
    show("Healthy runs", head, table)
    said = Counter((f[1], f[2]) for row in guarded for f in row["findings"])
    where = {key: sorted({r["task"] for r in guarded for f in r["findings"] if (f[1], f[2]) == key}) for key in said}
    show(
        "Who spoke", ["detector", "severity", "times", "tasks"], [[*k, n, ", ".join(where[k])] for k, n in said.items()]
    )
    acts = Counter((row["task"], "+".join(p[1]) or "refused", p[2]) for row in guarded for p in row["plans"])
    show("What was done", ["task", "plan", "cause", "times"], [[*k, n] for k, n in acts.items()])
    return {
        "steps": sum(row["steps"] for row in guarded),
        "interventions": sum(len(row["plans"]) for row in guarded),
        **{f"{severity}_per_10k": _per_10k(guarded, severity) for severity in LOUD},
        "bit_identical": {line[0]: line[-1] for line in table},
    }


def _per_10k(rows: list[Row], severity: str) -> float:
    steps: int = sum(row["steps"] for row in rows)
    times: int = sum(f[2] == severity for row in rows for f in row["findings"])
    return times * 1e4 / steps
