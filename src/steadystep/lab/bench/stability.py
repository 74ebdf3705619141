"""`bench stability`: the same transformer without measures, with clipping, with a warm-up too, and with everything.

Model and learning rate were chosen on seeds 0 to 2, looking at the first three arms only; seeds 100 to 109 are for
reporting. Failed means: NaN, or at the end at least 0.2 nats worse than the best run of the table.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, final

import torch
from rich.console import RenderableType
from rich.table import Table
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from steadystep.errors import TrainingHalted
from steadystep.guard import Guard
from steadystep.init import initialise_
from steadystep.lab.bench.study import Choice, Row, Study, StudyJob, pyplot, save_figure
from steadystep.lab.tasks.task import evaluating_apart
from steadystep.lab.tasks.text import GPT, GPTParts, GPTSize, TopicsText
from steadystep.schedule import warmup

SIZE = GPTSize(num_layers=6)
LR, MOMENTUM = 0.5, 0.9
MAX_NORM = 1.0
WARMUP_SHARE = 0.2
BATCH_SIZE = 8
LOOK_EVERY = 10


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StabilityRun:
    """How it went."""

    held_out: float
    """In nats per byte, after the last step; NaN when the weights are lost."""
    curve: tuple[tuple[int, float], ...]
    """(step, held-out loss) at every tenth step, on fewer windows; it ends where the weights are lost."""
    seconds: float
    """Of the processor, without the looking."""
    interventions: int = 0
    """Updates that the guard did not simply take."""


def plain(seed: int, *, num_steps: int, clip: bool, warm: bool) -> StabilityRun:
    """The loop as anybody writes it."""
    torch.manual_seed(seed)
    model = GPT(SIZE)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    rise = max(1, round(WARMUP_SHARE * num_steps))
    scheduler = LambdaLR(optimizer, warmup(rise)) if warm else None

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        model.loss(batch).backward()  # type: ignore[no-untyped-call]
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()

    return _trained(model, step, seed=seed, num_steps=num_steps)


def guarded(seed: int, *, num_steps: int) -> StabilityRun:
    """What steadystep has to prevent it: qk-norm, GPT-2's first weights, and the guard with clip and schedule."""
    torch.manual_seed(seed)
    model = GPT(SIZE, GPTParts(attention="stable"))
    initialise_(model, "gpt2", seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    settings: dict[str, Any] = {
        "max_grad_norm": MAX_NORM,
        "lr_scheduler": "cosine",
        "warmup_steps": WARMUP_SHARE,
        "total_steps": num_steps,
    }
    interventions = 0
    with Guard(model, optimizer, config={"training": settings}) as guard:

        def step(batch: Tensor) -> None:
            nonlocal interventions
            interventions += not guard.step(model.loss, batch=batch).plan.proceeds

        run = _trained(model, step, seed=seed, num_steps=num_steps)
    return replace(run, interventions=interventions)


def _trained(model: GPT, step: Callable[[Tensor], object], *, seed: int, num_steps: int) -> StabilityRun:
    text = TopicsText(context=SIZE.context, batch_size=BATCH_SIZE, seed=seed)
    few, all_windows = text.held_out(64), text.held_out()
    curve = [(0, _held_out(model, few))]
    seconds = 0.0
    try:
        for index in range(1, num_steps + 1):
            batch = text.batch()
            began = time.process_time()
            step(batch)
            seconds += time.process_time() - began
            if index % LOOK_EVERY == 0:
                curve.append((index, _held_out(model, few)))
                if not math.isfinite(curve[-1][1]):
                    break  # lost: a NaN in the weights stays
    except TrainingHalted:
        pass
    return StabilityRun(held_out=_held_out(model, all_windows), curve=tuple(curve), seconds=seconds)


def _held_out(model: GPT, windows: Tensor) -> float:
    with evaluating_apart(model):
        return float(model.loss(windows))


ARMS = ("no measures", "clip only", "clip + warm-up", "everything")
NUM_STEPS, NUM_QUICK_STEPS = 300, 40
MARGIN = 0.2
_TOP = 6.0  # of the figure
TARGET = 2.67
"""Where "clip + warm-up" ended on average on the seeds for choosing, in nats per byte."""


def jobs(choice: Choice) -> list[StudyJob]:
    """Every arm with every seed."""
    num_steps = NUM_QUICK_STEPS if choice.quick else NUM_STEPS
    return [
        StudyJob(key=f"{arm}/{seed}/{num_steps}", args={"arm": arm, "seed": seed, "num_steps": num_steps})
        for seed in choice.pick(full=range(100, 110), quick=(0,))
        for arm in ARMS
    ]


def run(job: StudyJob) -> Row:
    """One run."""
    arm, seed, num_steps = job.args["arm"], job.args["seed"], job.args["num_steps"]
    if arm == "everything":
        done = guarded(seed, num_steps=num_steps)
    else:
        done = plain(seed, num_steps=num_steps, clip=arm != "no measures", warm=arm == "clip + warm-up")
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
        title=f"Held-out loss of a {SIZE.num_layers}-layer transformer after {rows[0]['num_steps']} steps, "
        f"SGD {LR:g} momentum {MOMENTUM:g}",
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
    save_figure(drawing, path)


STUDY = Study(
    name="stability",
    about="no measures, clip only, clip + warm-up, everything: failures, loss, steps to a target",
    jobs=jobs,
    run=run,
    table=table,
    summary=summary,
    figure=figure,
)
