"""`steadystep bench detection`: who notices what, how soon, and how often for nothing."""

from collections.abc import Sequence
from pathlib import Path

from steadystep.lab.bench.detection_table import summary, table
from steadystep.lab.bench.drawing import pyplot
from steadystep.lab.bench.faulty import jobs as faulty
from steadystep.lab.bench.healthy import jobs as healthy
from steadystep.lab.bench.study import Choice, Job, Row, Study


def _jobs(choice: Choice) -> list[Job]:
    scope = faulty.Scope.of(choice)
    return [*faulty.twins(scope), *faulty.broken(scope, "unguarded"), *healthy.jobs(choice)]


def _run(job: Job) -> Row:
    return healthy.make(job) if job.args["kind"] == "healthy" else faulty.make(job)


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
        xscale="log", xlabel="alarms per 10,000 healthy steps (0 is drawn at 0.01)", ylabel="harmful runs noticed, %"
    )
    axes.set_ylim(0, 105)
    axes.set_xlim(0.005, 5e5)
    axes.grid(alpha=0.3)
    drawing.savefig(path, dpi=150)
    plot.close(drawing)


STUDY = Study(
    name="detection",
    about="faults noticed, and false alarms, beside the rules that others ship",
    jobs=_jobs,
    run=_run,
    table=table,
    summary=summary,
    figure=_figure,
    store=faulty.STORE,
    parts=faulty.PARTS,
)
