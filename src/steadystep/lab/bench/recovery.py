"""`steadystep bench recovery`: what is left of a run after a fault, by who looked after it."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, final

from rich.console import Group, RenderableType

from steadystep.lab.bench import faulty_jobs as faulty
from steadystep.lab.bench.faulty_jobs import AT_LEAST, Twins, identity, median, worst
from steadystep.lab.bench.faulty_run import TRIALS
from steadystep.lab.bench.header import stored_rows
from steadystep.lab.bench.screens import recovery_screens
from steadystep.lab.bench.study import Choice, Row, Study, StudyJob, pyplot, save_figure

BARS = {"within": 0.98, "median_lost": 5}
GUARDED = ("autopilot", "careful")
NAMED = {"frozen layer": "zero-gradient"}
"""Faults that only the user can end, and the cause that has to be named; they are counted apart too."""
NAMED_WITHIN = 200
"""Steps."""


@final
class Oracle:
    """What was possible: plain runs without the destroyed batches, by `benchmarks/oracle.py`."""

    def __init__(self, rows: Iterable[Row], twins: Twins) -> None:
        self._twins = twins
        self._scores = {self._key(row, row["destroyed"]): float(row["score"]) for row in rows if row["more"] is None}
        self._limits: dict[str, float] = defaultdict(lambda: AT_LEAST)
        for row in rows:
            ratio = float(row["score"]) / self._scores.get(self._key(row, row["destroyed"]), math.nan)
            if ratio == ratio:
                self._limits[row["task"]] = max(self._limits[row["task"]], ratio)

    def has(self, row: Row) -> bool:
        """Whether somebody has run it."""
        return self._key(row, TRIALS[row["trial"]].destroyed) in self._scores

    def limit(self, task: str) -> float:
        """The worst of those that go without one batch more, of all seeds of the task; 1.01 at least."""
        return self._limits[task]

    def ratio(self, row: Row) -> float:
        """The score over what was possible; NaN where nobody knows."""
        return float(row["score"]) / self._scores.get(self._key(row, TRIALS[row["trial"]].destroyed), math.nan)

    def fine(self, row: Row) -> bool:
        """As good as what was possible. So is a run that ends as if nothing had happened, whatever 20 batches cost."""
        return self.has(row) and (self.ratio(row) <= self.limit(row["task"]) or self._twins.fine(row))

    def agrees(self, row: Row) -> bool | None:
        """Whether the run of a clean twin is the oracle's to the last bit; None where there is none."""
        score = self._scores.get(self._key(row, 0))
        return None if score is None else score == float(row["score"])

    @staticmethod
    def _key(row: Row, destroyed: int) -> tuple[Any, ...]:
        return row["task"], row["seed"], row["num_steps"], row["precision"], destroyed


def named(row: Row) -> bool:
    """Whether the cause of a fault that only the user can end was the first thing said about it, in time."""
    cause, noticed = NAMED.get(row["trial"]), row["noticed"]
    in_time = noticed is not None and noticed - row["start"] <= NAMED_WITHIN
    return cause is not None and in_time and str(row["said"]).endswith(f": {cause}")


def summary(rows: Sequence[Row], possible: Sequence[Row] | None = None) -> dict[str, Any]:
    """For a program; the tables are made from it. `possible` are rows of the oracle, by default those stored."""
    runs = [row for row in rows if row["kind"] == "run"]
    twins = Twins(runs)
    seeds = {row["seed"] for row in runs}  # the spread of other seeds is no excuse for these
    known = stored_rows("oracle") if possible is None else possible
    oracle = Oracle([row for row in known if row["seed"] in seeds], twins)
    runs += [row for row in stored_rows() if twins.has(row)]
    broken = [row for row in runs if row["trial"] and twins.has(row)]
    harmful = {identity(row) for row in broken if row["arm"] == "unguarded" and not twins.fine(row)}
    harmless = {identity(row) for row in broken if row["arm"] == "unguarded"} - harmful
    alone = [row for row in runs if not row["trial"]]
    arms = list(dict.fromkeys(row["arm"] for row in broken))
    common = _common(broken, [arm for arm in arms if arm not in ("unguarded", *GUARDED)])
    guard = [row for row in broken if row["arm"] == "autopilot"]
    agree = [oracle.agrees(row) for row in runs if row["arm"] == "clean"]
    return {
        "harmful_runs": len(harmful),
        "bars": BARS,
        "limits": {task: twins.limit(task) for task in dict.fromkeys(row["task"] for row in broken)},
        "oracle": {
            "limits": {task: oracle.limit(task) for task in dict.fromkeys(row["task"] for row in broken)},
            "clean_runs": sum(each is not None for each in agree),
            "identical": sum(each is True for each in agree),
        },
        "guard": [_arm(arm, [r for r in broken if r["arm"] == arm], harmful, alone, twins, oracle) for arm in GUARDED],
        "arms": [
            _arm(arm, [r for r in broken if r["arm"] == arm and r["seed"] in common], harmful, alone, twins, oracle)
            for arm in arms
        ],
        "arm_seeds": sorted(common),
        "faults": [
            line
            for trial in TRIALS
            if (line := _fault(trial, [r for r in broken if r["trial"] == trial], harmful, twins, oracle))
        ],
        "harmless": _harmless(guard, harmless, twins),
    }


def _common(broken: list[Row], others: list[str]) -> set[int]:
    """Seeds that every arm has; all of them where there are only our own, or none in common yet."""
    seeds = [{row["seed"] for row in broken if row["arm"] == arm} for arm in others]
    common = set.intersection(*seeds) if seeds else set[int]()
    return common or {row["seed"] for row in broken}


def _arm(
    arm: str, rows: list[Row], harmful: set[Any], alone: list[Row], twins: Twins, oracle: Oracle
) -> dict[str, Any]:
    mine = [row for row in rows if identity(row) in harmful]
    ratios = [twins.ratio(row) for row in mine]
    itself = [twins.ratio(row) for row in alone if row["arm"] == arm]
    lost = [float(row["lost"]) for row in mine if not math.isnan(row["score"])]
    return {
        "arm": arm,
        "runs": len(mine),
        "within_1_percent": sum(ratio <= 1.01 for ratio in ratios),
        "within": sum(twins.fine(row) for row in mine),
        "oracle_runs": sum(oracle.has(row) for row in mine),
        "within_oracle": sum(oracle.fine(row) for row in mine),
        "reachable_runs": sum(oracle.has(row) and row["trial"] not in NAMED for row in mine),
        "within_reachable": sum(oracle.fine(row) and row["trial"] not in NAMED for row in mine),
        "to_name": sum(row["trial"] in NAMED for row in mine),
        "named": sum(named(row) for row in mine),
        "within_but_for_lost": sum(twins.fine_but_for_lost(row) for row in mine),
        "median": median(ratios),
        "lost_to_nan": sum(not row["finite"] for row in mine),
        "crashed": sum(row["stopped"].startswith("crashed") for row in mine),
        "stopped": sum(bool(row["stopped"]) and not row["stopped"].startswith("crashed") for row in mine),
        "median_lost": median(lost) if lost else None,
        "median_lr": median([row["lr"] for row in mine]) if mine else None,
        "without_a_fault": median(itself) if itself else None,
    }


def _fault(trial: str, rows: list[Row], harmful: set[Any], twins: Twins, oracle: Oracle) -> dict[str, Any] | None:
    guarded = [row for row in rows if row["arm"] == "autopilot" and identity(row) in harmful]
    if not guarded:
        return None
    ratios = [twins.ratio(row) for row in guarded]
    alone = [twins.ratio(row) for row in rows if row["arm"] == "unguarded" and identity(row) in harmful]
    careful = [row for row in rows if row["arm"] == "careful" and identity(row) in harmful]
    did: Counter[str] = Counter(name for row in guarded for name in row["did"])
    missed = Counter(row["task"] for row in guarded if not twins.fine(row))
    return {
        "fault": trial,
        "runs": len(guarded),
        "within": sum(twins.fine(row) for row in guarded),
        "oracle_runs": sum(oracle.has(row) for row in guarded),
        "within_oracle": sum(oracle.fine(row) for row in guarded),
        "within_but_for_lost": sum(twins.fine_but_for_lost(row) for row in guarded),
        "careful_within": sum(twins.fine(row) for row in careful),
        "median": median(ratios),
        "worst": worst(ratios),
        "unguarded": median(alone),
        "median_lost": median([float(row["lost"]) for row in guarded]),
        "did": dict(did),
        "missed_on": dict(missed),
        "oracle_missed_on": dict(Counter(row["task"] for row in guarded if oracle.has(row) and not oracle.fine(row))),
    }


def _harmless(guard: list[Row], harmless: set[Any], twins: Twins) -> list[dict[str, Any]]:
    lines = []
    for trial in TRIALS:
        mine = [row for row in guard if row["trial"] == trial and identity(row) in harmless]
        if mine:
            did: Counter[str] = Counter(name for row in mine for name in row["did"])
            lines.append(
                {
                    "fault": trial,
                    "runs": len(mine),
                    "acted": sum(row["acted"] is not None for row in mine),
                    "harmed": sum(not twins.fine(row) for row in mine),
                    "did": dict(did),
                    "worst": worst([twins.ratio(row) for row in mine]),
                }
            )
    return lines


def table(rows: Sequence[Row]) -> RenderableType:
    """For people."""
    return Group(*recovery_screens(summary(rows)))


def _jobs(choice: Choice) -> list[StudyJob]:
    scope = faulty.Scope.of(choice)
    few = scope.seeds[: faulty.RULE_SEEDS]
    rules = ("clip 1.0", "ZClip") if choice.quick else faulty.RULE_ARMS
    return [
        *faulty.twins(scope),
        *(job for arm in ("unguarded", "autopilot", "careful") for job in faulty.broken(scope, arm)),
        *(job for arm in rules for job in faulty.broken(scope, arm, seeds=few)),
        *(job for arm in rules for job in faulty.alone(scope, arm, seeds=few)),
    ]


def _figure(rows: Sequence[Row], path: Path) -> None:
    """The share of harmful runs that each arm brought through."""
    lines = sorted(summary(rows)["arms"], key=lambda line: line["within"] / max(1, line["runs"]))
    plot = pyplot()
    drawing, axes = plot.subplots(figsize=(8, 0.45 * len(lines) + 1.4), layout="constrained")
    shares = [100 * line["within"] / max(1, line["runs"]) for line in lines]
    ours = [line["arm"] in ("autopilot", "careful") for line in lines]
    bars = axes.barh([line["arm"] for line in lines], shares, color=["#c0392b" if mine else "#34495e" for mine in ours])
    axes.bar_label(bars, fmt="%.0f %%", padding=4)
    axes.set(xlabel="harmful runs that end as well as without the fault, %", xlim=(0, 112))
    save_figure(drawing, path)


STUDY = Study(
    name="recovery",
    about="runs after a fault: unguarded, with each competing rule, guarded",
    jobs=_jobs,
    run=faulty.make,
    table=table,
    summary=summary,
    figure=_figure,
    store=faulty.STORE,
    parts=faulty.PARTS,
)
