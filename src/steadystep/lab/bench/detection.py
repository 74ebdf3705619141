"""`steadystep bench detection`: who notices what, how soon, and how often for nothing."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Group, RenderableType

from steadystep.lab.bench import faulty_arms
from steadystep.lab.bench import faulty_jobs as faulty
from steadystep.lab.bench.faulty_jobs import Twins, is_slow, median
from steadystep.lab.bench.faulty_run import NATS, TRIALS
from steadystep.lab.bench.rival_rules import RULES
from steadystep.lab.bench.screens import detection_screens
from steadystep.lab.bench.study import Choice, Row, Study, StudyJob, pyplot, save_figure

OURS = "steadystep"
BARS = {"recall": 0.99, "warnings_per_10k": 0.5, "acts_per_10k": 0.05, "median_lead": 50.0}


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """For a program; the tables are made from it."""
    healthy = [row for row in rows if row["kind"] == "healthy"]
    runs = [row for row in rows if row["kind"] == "run"]
    twins = Twins(runs)
    broken = [row for row in runs if row["arm"] == "unguarded" and twins.has(row)]
    harmful = [row for row in broken if not twins.fine(row)]
    harmless = [row for row in broken if twins.fine(row)]
    steps = sum(row["steps"] for row in healthy)
    who = [_line(name, harmful, broken, healthy, twins) for name in (OURS, *RULES)]
    return {
        "harmful_runs": len(harmful),
        "harmless_runs": len(harmless),
        "healthy_steps": steps,
        "limits": {task: twins.limit(task) for task in dict.fromkeys(row["task"] for row in broken)},
        "bars": BARS,
        "who": who,
        "faults": [
            line for trial in TRIALS if (line := _fault(trial, [r for r in broken if r["trial"] == trial], twins))
        ],
        "false": _false(healthy),
        "slow": _slow(broken, twins),
        "spikes": _spikes(healthy),
    }


def _noticed(row: Row, who: str) -> int | None:
    step: int | None = row["noticed"] if who == OURS else row["alarms"].get(who)
    return step


def _line(who: str, harmful: list[Row], broken: list[Row], healthy: list[Row], twins: Twins) -> dict[str, Any]:
    info = RULES.get(who)
    seen = [row for row in harmful if who == OURS or _was_shown(row, who)]
    noticed = [row for row in seen if _noticed(row, who) is not None]
    delays = [float((_noticed(row, who) or 0) - row["start"]) for row in noticed if not is_slow(row)]
    leads = [lead for row in broken if is_slow(row) and _was_shown(row, who) for lead in _lead(row, who, twins)]
    shown = [row for row in healthy if who == OURS or who in row["alarms"]]
    steps = sum(row["steps"] for row in shown)
    alarms = sum(row["warnings"] if who == OURS else row["alarms"][who] for row in shown)
    acts = sum(row["acts"] for row in shown) if info is None else 0 if info.does == "log" else alarms
    return {
        "name": who,
        "runs": len(seen),
        "noticed": len(noticed),
        "recall": len(noticed) / len(seen) if seen else None,
        "median_delay": median(delays) if delays else None,
        "within_5_steps": sum(delay <= 5 for delay in delays),
        "delays": len(delays),
        "slow_runs": len(leads),
        "median_lead": median(leads) if leads else None,
        "alarms_per_10k": alarms * 1e4 / steps if steps else None,
        "acts_per_10k": acts * 1e4 / steps if steps else None,
    }


def _was_shown(row: Row, who: str) -> bool:
    """Rules for Adam see nothing under SGD, and none is tried in fp16."""
    info = RULES.get(who)
    return info is None or (row["precision"] == "fp32" and not (info.only_adam and row["task"] == "clusters"))


def _lead(row: Row, who: str, twins: Twins, than: Literal["best", "twin"] = "best") -> list[float]:
    lead = twins.lead(row, _noticed(row, who), than=than)
    return [] if lead is None else [lead]


def _fault(trial: str, rows: list[Row], twins: Twins) -> dict[str, Any] | None:
    if not rows:
        return None
    harmful = [row for row in rows if not twins.fine(row)]
    noticed = [row for row in harmful if row["noticed"] is not None]
    said = Counter(row["said"].split(":")[0] for row in noticed)
    missed = Counter(row["task"] for row in harmful if row["noticed"] is None)
    return {
        "fault": trial,
        "runs": len(rows),
        "harmful": len(harmful),
        "noticed": len(noticed),
        "median_delay": median([float(row["noticed"] - row["start"]) for row in noticed]) if noticed else None,
        "said": ", ".join(f"{name} {count}" for name, count in said.most_common(2)),
        "missed_on": dict(missed),
        "spoke_though_harmless": sum(row["noticed"] is not None for row in rows if twins.fine(row)),
        "rules": {name: _share(name, harmful) for name in RULES},
    }


def _share(rule: str, harmful: list[Row]) -> float | None:
    shown = [row for row in harmful if _was_shown(row, rule)]
    return sum(rule in row["alarms"] for row in shown) / len(shown) if shown else None


def _false(healthy: list[Row]) -> list[dict[str, Any]]:
    lines = []
    for task in dict.fromkeys(row["task"] for row in healthy):
        mine = [row for row in healthy if row["task"] == task]
        said: Counter[str] = sum((Counter(row["said"]) for row in mine), Counter())
        lines.append(
            {
                "task": task,
                "steps": sum(row["steps"] for row in mine),
                "warnings": sum(row["warnings"] for row in mine),
                "acts": sum(row["acts"] for row in mine),
                "said": dict(said),
            }
        )
    return lines


def _slow(broken: list[Row], twins: Twins) -> list[dict[str, Any]]:
    lines = []
    places = dict.fromkeys((row["trial"], row["task"]) for row in broken if is_slow(row) and row["task"] in NATS)
    for trial, task in places:
        mine = [row for row in broken if (row["trial"], row["task"]) == (trial, task)]
        leads = [lead for row in mine for lead in _lead(row, OURS, twins)]
        over_twin = [lead for row in mine for lead in _lead(row, OURS, twins, "twin")]
        after = [float(row["noticed"] - row["start"]) for row in mine if row["noticed"] is not None]
        lines.append(
            {
                "fault": trial,
                "task": task,
                "runs": len(mine),
                "damaged": len(leads),
                "in_time": sum(lead > 0 for lead in leads),
                "median_lead": median(leads) if leads else None,
                "shortest_lead": min(leads, default=None),
                "median_lead_over_twin": median(over_twin) if over_twin else None,
                "median_after": median(after) if after else None,
            }
        )
    return lines


def _spikes(healthy: list[Row]) -> dict[str, dict[str, int]]:
    total: dict[str, Counter[str]] = {}
    for row in healthy:
        for name, counts in row["spikes"].items():
            total.setdefault(name, Counter()).update(counts)
    return {name: dict(counts) for name, counts in total.items()}


def table(rows: Sequence[Row]) -> RenderableType:
    """For people."""
    return Group(*detection_screens(summary(rows)))


def _jobs(choice: Choice) -> list[StudyJob]:
    scope = faulty.Scope.of(choice)
    return [*faulty.twins(scope), *faulty.broken(scope, "unguarded"), *faulty_arms.healthy_jobs(choice)]


def _run(job: StudyJob) -> Row:
    return faulty_arms.make_healthy(job) if job.args["kind"] == "healthy" else faulty.make(job)


def _figure(rows: Sequence[Row], path: Path) -> None:
    """Recall against false alarms: the upper left corner is where one wants to be."""
    lines = [line for line in summary(rows)["who"] if line["recall"] is not None]
    plot = pyplot()
    drawing, axes = plot.subplots(figsize=(8, 4.5), layout="constrained")
    spots = {line["name"]: (max(line["alarms_per_10k"] or 0.0, 0.01), 100 * line["recall"]) for line in lines}
    crowd = sorted((name for name, (alarms, _) in spots.items() if alarms > 2000), key=lambda name: -spots[name][1])
    for name, spot in spots.items():
        ours = name == "steadystep"
        axes.scatter(*spot, s=90 if ours else 45, color="#c0392b" if ours else "#34495e", zorder=3)
        # why: rules that act on most steps lie on top of each other; their names stand in a column beside
        place = (3e4, 95 - 9 * crowd.index(name)) if name in crowd else (spot[0] * 1.25, spot[1] + 3)
        line_to = {"arrowstyle": "-", "color": "#bdc3c7"} if name in crowd else None
        axes.annotate(name, spot, xytext=place, fontsize=9, va="center", arrowprops=line_to)
    axes.set(
        xscale="log", xlabel="alarms per 10,000 healthy steps (0 is drawn at 0.01)", ylabel="harmful runs detected, %"
    )
    axes.set_ylim(0, 105)
    axes.set_xlim(0.005, 5e5)
    axes.grid(alpha=0.3)
    save_figure(drawing, path)


STUDY = Study(
    name="detection",
    about="faults detected and false alarms, compared with the rules of other tools",
    jobs=_jobs,
    run=_run,
    table=table,
    summary=summary,
    figure=_figure,
    store=faulty.STORE,
    parts=faulty.PARTS,
)
