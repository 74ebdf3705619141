"""`steadystep bench recovery`: what is left of a run after a fault, by who looked after it."""

from collections.abc import Sequence
from pathlib import Path

from steadystep.lab.bench.drawing import pyplot
from steadystep.lab.bench.faulty import jobs as faulty
from steadystep.lab.bench.recovery_table import summary, table
from steadystep.lab.bench.study import Choice, Job, Row, Study


def _jobs(choice: Choice) -> list[Job]:
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
    drawing.savefig(path, dpi=150)
    plot.close(drawing)


STUDY = Study(
    name="recovery",
    about="what is left of a run after a fault: unguarded, with each rule, guarded",
    jobs=_jobs,
    run=faulty.make,
    table=table,
    summary=summary,
    figure=_figure,
    store=faulty.STORE,
    parts=faulty.PARTS,
)
