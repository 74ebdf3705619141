"""`bench stability`: the same transformer without measures, with clipping, with a warm-up too, and with everything.

Model and learning rate were chosen on seeds 0 to 2, looking at the first three arms only; seeds 100 to 109 are for
reporting. Failed means: NaN, or at the end at least 0.2 nats worse than the best run of the table.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from steadystep.lab.bench import stability_run as runs
from steadystep.lab.bench.drawing import pyplot
from steadystep.lab.bench.study import Choice, Job, Row, Study

ARMS = ("no measures", "clip only", "clip + warm-up", "everything")
NUM_STEPS, NUM_QUICK_STEPS = 300, 40
MARGIN = 0.2
_TOP = 6.0  # of the figure
TARGET = 2.67
"""Where "clip + warm-up" ended on average on the seeds for choosing, in nats per byte."""


def jobs(choice: Choice) -> list[Job]:
    """Every arm with every seed."""
    num_steps = NUM_QUICK_STEPS if choice.quick else NUM_STEPS
    return [
        Job(key=f"{arm}/{seed}/{num_steps}", args={"arm": arm, "seed": seed, "num_steps": num_steps})
        for seed in choice.pick(full=range(100, 110), quick=(0,))
        for arm in ARMS
    ]


def run(job: Job) -> Row:
    """One run."""
    arm, seed, num_steps = job.args["arm"], job.args["seed"], job.args["num_steps"]
    if arm == "everything":
        done = runs.guarded(seed, num_steps=num_steps)
    else:
        done = runs.plain(seed, num_steps=num_steps, clip=arm != "no measures", warm=arm == "clip + warm-up")
    return {
        "held_out": done.held_out,
        "curve": [[step, round(loss, 4)] for step, loss in done.curve],
        "seconds": round(done.seconds, 2),
        "interventions": done.interventions,
    }


def failed(held_out: float, *, best: float) -> bool:
    """NaN, infinite, or 0.2 nats worse than the best.

    >>> failed(math.nan, best=2.0), failed(2.2, best=2.0), failed(2.19, best=2.0)
    (True, True, False)
    """
    return not math.isfinite(held_out) or held_out >= best + MARGIN


def steps_to(target: float, curve: Sequence[Sequence[float]]) -> int | None:
    """The first step at which the held-out loss is no higher; None when it never is.

    >>> steps_to(2.5, [[10, 3.0], [20, 2.4], [30, 2.6]]), steps_to(1.0, [[10, 3.0]])
    (20, None)
    """
    return next((int(step) for step, loss in curve if loss <= target), None)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Per arm: lost and failed runs, the losses of those that ended, and steps to the target."""
    finite = [row["held_out"] for row in rows if math.isfinite(row["held_out"])]
    best = min(finite, default=math.nan)
    return {"best": best, "target": TARGET, "arms": {arm: _line(arm, rows, best) for arm in ARMS}}


def _line(arm: str, rows: Sequence[Row], best: float) -> dict[str, Any]:
    mine = [row for row in rows if row["arm"] == arm]
    losses = [row["held_out"] for row in mine if math.isfinite(row["held_out"])]
    lost_at = [row["curve"][-1][0] for row in mine if not math.isfinite(row["held_out"]) and row["curve"]]
    reached = [step for row in mine if (step := steps_to(TARGET, row["curve"])) is not None]
    # a run that never gets there counts as one that would take for ever
    steps = sorted([*reached, *[math.inf] * (len(mine) - len(reached))])
    return {
        "runs": len(mine),
        "lost": len(mine) - len(losses),
        "lost_at": median(lost_at) if lost_at else None,
        "failed": sum(failed(row["held_out"], best=best) for row in mine),
        "held_out": fmean(losses) if losses else math.nan,
        "spread": stdev(losses) if len(losses) > 1 else 0.0,
        "worst": max(losses, default=math.nan),
        "reached": len(reached),
        "steps_to_target": median(steps) if steps else math.inf,
        "seconds": fmean(row["seconds"] for row in mine) if mine else math.nan,
        "interventions": sum(row["interventions"] for row in mine),
    }


def table(rows: Sequence[Row]) -> RenderableType:
    """One line per arm."""
    told = summary(rows)
    shown = Table(
        title=f"Held-out loss of a {runs.SIZE.num_layers}-layer transformer after {rows[0]['num_steps']} steps, "
        f"SGD {runs.LR:g} momentum {runs.MOMENTUM:g}",
        caption=f"failed: NaN, or at least {MARGIN} nats worse than the best run ({told['best']:.3f}); loss: mean and "
        "deviation of the runs that ended; steps: median, and how many got there; time: of the processor, per run",
    )
    for column in ("measures", "NaN", "failed", "loss", f"steps to {TARGET}", "time"):
        shown.add_column(column, justify="left" if column == "measures" else "right", no_wrap=True)
    for arm, line in told["arms"].items():
        if not line["runs"]:
            continue
        of = f"/{line['runs']}"
        ended = math.isfinite(line["held_out"])
        shown.add_row(
            arm,
            f"{line['lost']}{of}",
            f"[{'red' if line['failed'] else 'green'}]{line['failed']}{of}[/]",
            f"{line['held_out']:.3f} ± {line['spread']:.3f}" if ended else "none",
            f"{line['steps_to_target']:.0f} ({line['reached']}{of})" if line["reached"] else "never",
            f"{line['seconds']:.1f} s",
        )
    return shown


def figure(rows: Sequence[Row], path: Path) -> None:
    """Each run a line; those that were lost end in a cross."""
    plt = pyplot()
    drawing, axes = plt.subplots(1, len(ARMS), figsize=(12, 3.2), sharey=True)
    for panel, arm in zip(axes, ARMS, strict=True):
        for row in (row for row in rows if row["arm"] == arm):
            kept = [(step, min(loss, _TOP)) for step, loss in row["curve"] if math.isfinite(loss)]
            lost = len(kept) < len(row["curve"])
            panel.plot(*zip(*kept, strict=True), color="tab:red" if lost else "tab:blue", alpha=0.6, linewidth=1)
            if lost:
                panel.plot(*kept[-1], "x", color="tab:red", clip_on=False)
        panel.axhline(TARGET, color="grey", linestyle=":", linewidth=1)
        panel.set_title(arm)
        panel.set_xlabel("step")
        panel.set_xlim(0, rows[0]["num_steps"])
        panel.set_ylim(2.2, _TOP)
    axes[0].set_ylabel("held-out loss, nats per byte")
    drawing.tight_layout()
    drawing.savefig(path, dpi=150)
    plt.close(drawing)


STUDY = Study(
    name="stability",
    about="no measures, clip only, clip + warm-up, everything: failures, loss, steps to a target",
    jobs=jobs,
    run=run,
    table=table,
    summary=summary,
    figure=figure,
)
