"""`steadystep bench overhead`: guarded step over plain step with clip_grad_norm_ and loss.item(), interleaved."""

import ctypes
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType
from rich.table import Table

from steadystep.lab.bench.header import stored_rows
from steadystep.lab.bench.overhead_steps import (
    MODELS,
    QUICK,
    Setup,
    TimedStep,
    bytes_within,
    fresh,
    guarded_step,
    plain_step,
    reads_per_step,
)
from steadystep.lab.bench.study import Choice, Row, Study, StudyJob, pyplot, save_figure

WARM_STEPS = 60
"""Alone: the third copy of the state, at step 40, sets how often one is taken."""


def seconds(step: TimedStep, repeats: int) -> float:
    """By the clock."""
    started = time.perf_counter()
    for _ in range(repeats):
        step()
    return time.perf_counter() - started


def ratios(plain: TimedStep, candidate: TimedStep, plain_again: TimedStep, *, blocks: int, repeats: int) -> list[float]:
    """Of each block: the candidate over the mean of its two plain neighbours."""
    result = []
    for _ in range(blocks):
        before = seconds(plain, repeats)
        middle = seconds(candidate, repeats)
        after = seconds(plain_again, repeats)
        result.append(2 * middle / (before + after))
    return result


def compared(plain: tuple[TimedStep, TimedStep, TimedStep], candidate: TimedStep, *, blocks: int) -> dict[str, float]:
    """Median and quartiles of the ratios, and the noise: the same with a third plain loop for a candidate."""
    first, second, third = plain
    for step in (*plain, candidate):
        seconds(step, WARM_STEPS)
    repeats = max(2, int(0.05 / (seconds(first, 20) / 20)))
    found = ratios(first, candidate, second, blocks=blocks, repeats=repeats)
    noise = ratios(first, third, second, blocks=blocks, repeats=repeats)
    low, middle, high = statistics.quantiles(found, n=4)
    noise_low, noise_middle, noise_high = statistics.quantiles(noise, n=4)
    return {
        "ratio": middle,
        "low": low,
        "high": high,
        "noise": noise_middle,
        "noise_low": noise_low,
        "noise_high": noise_high,
        "plain_us": seconds(first, repeats) / repeats * 1e6,
    }


def never_trim_the_heap() -> bool:
    """M_TRIM_THRESHOLD (-1) and M_MMAP_THRESHOLD (-3) to 1 GiB; False where the C library has no mallopt."""
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, 1 << 30)
        libc.mallopt(-3, 1 << 30)
    except (OSError, AttributeError):
        return False
    return True


OURS = "steadystep"


def _jobs(choice: Choice) -> list[StudyJob]:
    return jobs(OURS, quick=choice.quick)


def jobs(who: str, *, quick: bool) -> list[StudyJob]:
    """Every model for one candidate."""
    blocks = 4 if quick else 40
    return [
        StudyJob(key=f"{who}/{name}/{blocks}", args={"who": who, "model": name, "blocks": blocks})
        for name in (QUICK if quick else MODELS)
    ]


def _run(job: StudyJob) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        return measured(job, lambda setup: guarded_step(setup, Path(folder)))


def measured(job: StudyJob, make: Callable[[Setup], TimedStep]) -> Row:
    """Ratio, host reads and bytes of one candidate on one model. The clock is all that differs between two runs."""
    torch.set_num_threads(1)  # less noise
    never_trim_the_heap()
    name = job.args["model"]
    first, second, third = (plain_step(fresh(name)) for _ in range(3))
    row: dict[str, Any] = {"plain_reads": reads_per_step(first), "threads": 1}
    seconds(first, WARM_STEPS)
    setup = fresh(name)
    candidate = make(setup)
    seconds(candidate, WARM_STEPS)
    row |= {
        "parameters": sum(p.numel() for p in setup[0].parameters()),
        "tensors": len(list(setup[0].parameters())),
        "reads": reads_per_step(candidate),
        "beyond_plain_bytes": bytes_within(candidate) - bytes_within(first),
    }
    return row | compared((first, second, third), candidate, blocks=job.args["blocks"])


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The rows themselves say it all."""
    return {"models": [dict(row) for row in rows], "rivals": [dict(row) for row in _rivals(rows)]}


def _rivals(rows: Sequence[Row]) -> list[Row]:
    """Rows of real packages on the same models, where somebody has made them, each the newest."""
    known = {row["model"] for row in rows}
    newest = {(row["who"], row["model"]): row for row in stored_rows("rivals-overhead") if row["model"] in known}
    return list(newest.values())


def table(rows: Sequence[Row]) -> RenderableType:
    """One line per model and candidate."""
    made = Table(title="A step with it over a plain step (clip_grad_norm_, loss.item())", title_justify="left")
    for name in ("who", "model"):
        made.add_column(name, no_wrap=True)
    columns = (
        "parameters",
        "tensors",
        "ratio",
        "quartiles",
        "plain / plain",
        "plain step",
        "host reads",
        "held beyond plain",
    )
    for name in columns:
        made.add_column(name, justify="right")
    for row in (*rows, *_rivals(rows)):
        made.add_row(
            row["who"],
            row["model"],
            f"{row['parameters']:,}",
            f"{row['tensors']:,}",
            f"{row['ratio']:.3f}",
            f"{row['low']:.3f} to {row['high']:.3f}",
            f"{row['noise']:.3f} ({row['noise_low']:.3f} to {row['noise_high']:.3f})",
            f"{row['plain_us']:,.0f} µs",
            f"{row['reads']:.1f} (plain {row['plain_reads']:.1f})",
            f"{row['beyond_plain_bytes'] / max(1, row['parameters']):.1f} B / parameter",
            style="bold" if row["who"] == OURS else "",
        )
    return made


def _figure(rows: Sequence[Row], path: Path) -> None:
    """Median and quartiles of each ratio, and the noise floor behind."""
    plot = pyplot()
    lines = [*rows, *_rivals(rows)]
    drawing, axes = plot.subplots(figsize=(8, 0.5 * len(lines) + 1.4), layout="constrained")
    for place, row in enumerate(lines):
        axes.plot([row["noise_low"], row["noise_high"]], [place, place], color="#bdc3c7", linewidth=9, zorder=1)
        axes.plot([row["low"], row["high"]], [place, place], color="#34495e", linewidth=2, zorder=2)
        axes.plot(row["ratio"], place, "o", color="#c0392b" if row["who"] == OURS else "#34495e", zorder=3)
    axes.set_yticks(range(len(lines)), [f"{row['who']}: {row['model']}" for row in lines])
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set(xlabel="time of a step over a plain step; grey: plain over plain")
    save_figure(drawing, path)


STUDY = Study(
    name="overhead",
    about="guarded step over plain step, host reads and bytes, by model size and number of tensors",
    jobs=_jobs,
    run=_run,
    table=table,
    summary=summary,
    figure=_figure,
    alone=True,
)
