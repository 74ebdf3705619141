"""`bench precision`: fp32, bf16, fp16 without and with loss scaling: loss, overflow and underflow, memory, speed.

Each twice: with the loss as it is, and with the loss divided by 4096, as when it is shared out over many micro-batches
or weighted low beside another. Adam takes the same steps for both, but gradients of activations below 6e-8, fp16's
smallest number, become zero. The divisor was chosen on seeds 0 and 1; seeds 100 to 102 are for reporting.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, final

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from torch import Tensor

from steadystep.lab.bench.study import Choice, Row, Study, StudyJob, pyplot, save_figure
from steadystep.lab.tasks.task import evaluating_apart
from steadystep.lab.tasks.text import GPT, GPTSize, TopicsText
from steadystep.memory.recompute import count_saved
from steadystep.precision import Format, Precision, underflow_share

FORMATS: dict[str, tuple[Format, bool]] = {
    "fp32": ("fp32", False),
    "bf16": ("bf16", False),
    "fp16, no scaling": ("fp16", False),
    "fp16 + scaling": ("fp16", True),
}
"""Number format and whether a loss scaler is used."""

SIZE = GPTSize(d_model=32, num_layers=2, num_heads=2)
LR = 3e-3
BATCH_SIZE = 8
_LOOK_EVERY = 10


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionRun:
    """How it went."""

    held_out: float
    """In nats per byte and always in fp32, so that formats are compared by what they learned."""
    overflows: int
    """Updates whose gradients were not finite."""
    underflow: float
    """The mean share of gradient elements that are exactly zero."""
    saved_bytes: int
    """What one forward pass keeps for the backward pass."""


@final
class PrecisionTraining:
    """A model in one format; `divisor` makes the loss smaller, which Adam does not mind."""

    def __init__(self, name: str, *, divisor: float, seed: int) -> None:
        setting, self._scaled = FORMATS[name]
        torch.manual_seed(seed)
        self.model = GPT(SIZE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)
        self.text = TopicsText(context=SIZE.context, batch_size=BATCH_SIZE, seed=seed)
        self._precision = Precision(setting)
        self._divisor = divisor

    def loss(self, batch: Tensor) -> Tensor:
        """Under autocast."""
        with self._precision.autocast():
            return self.model.loss(batch) / self._divisor

    def backward(self, batch: Tensor) -> bool:
        """Gradients of one batch, unscaled; False if they are not finite."""
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        if self._scaled:
            self._precision.backward(loss)
            self._precision.unscale_(self.optimizer)
        else:
            loss.backward()  # type: ignore[no-untyped-call]
        return bool(torch.nn.utils.get_total_norm(self.grads()).isfinite())

    def update(self, *, finite: bool) -> None:
        """Without a scaler nobody looks: the update is taken, whatever it is."""
        if not self._scaled:
            self.optimizer.step()
        elif finite:
            self._precision.step(self.optimizer)
        else:
            self._precision.refuse(overflow=True)

    def grads(self) -> list[Tensor]:
        """Of all parameters."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]


def train(name: str, *, divisor: float, seed: int, num_steps: int) -> PrecisionRun:
    """The loop as anybody writes it."""
    training = PrecisionTraining(name, divisor=divisor, seed=seed)
    batch = TopicsText(context=SIZE.context, batch_size=BATCH_SIZE, seed=seed).batch()
    saved = count_saved(training.model, lambda: training.loss(batch))
    overflows, zeros = 0, []
    for step in range(num_steps):
        finite = training.backward(training.text.batch())
        overflows += not finite
        if finite and step % _LOOK_EVERY == 0:
            zeros.append(float(underflow_share(training.grads())))
        training.update(finite=finite)
    with evaluating_apart(training.model):
        held_out = float(training.model.loss(training.text.held_out()))
    return PrecisionRun(held_out=held_out, overflows=overflows, underflow=fmean(zeros or [0.0]), saved_bytes=saved)


def speed(*, num_rounds: int, num_steps: int) -> dict[str, float]:
    """Time of a training step over that in fp32: formats take turns, so that a busy machine is busy for all of them."""
    trainings = {name: PrecisionTraining(name, divisor=1.0, seed=0) for name in FORMATS}
    rounds: list[dict[str, float]] = []
    for number in range(num_rounds + 1):
        took = {name: _seconds(training, num_steps) for name, training in trainings.items()}
        if number:  # the first is for warming up
            rounds.append({name: seconds / took["fp32"] for name, seconds in took.items()})
    return {name: median(each[name] for each in rounds) for name in FORMATS}


def _seconds(training: PrecisionTraining, num_steps: int) -> float:
    began = time.process_time()
    for _ in range(num_steps):
        training.update(finite=training.backward(training.text.batch()))
    return time.process_time() - began


SETTINGS = {"loss": 1.0, "loss / 4096": 4096.0}
NUM_STEPS, NUM_QUICK_STEPS = 300, 8
MARGIN = 0.2
NOTE = (
    "Half precision is slower than fp32 on a CPU without hardware support for it, as the times show; on a GPU with "
    "tensor cores it is faster, which was not measured here. Losses, overflow, underflow and memory do not depend "
    "on that."
)


def jobs(choice: Choice) -> list[StudyJob]:
    """Every setting and format with every seed, and one job for the speed."""
    num_steps = NUM_QUICK_STEPS if choice.quick else NUM_STEPS
    rounds, steps = (1, 1) if choice.quick else (9, 5)
    trainings = [
        StudyJob(
            key=f"{setting}/{name}/{seed}/{num_steps}",
            args={"what": "training", "setting": setting, "format": name, "seed": seed, "num_steps": num_steps},
        )
        for seed in choice.pick(full=range(100, 103), quick=(0,))
        for setting in SETTINGS
        for name in FORMATS
    ]
    timing = StudyJob(key=f"speed/{rounds}/{steps}", args={"what": "speed", "num_rounds": rounds, "num_steps": steps})
    return [*trainings, timing]


def run(job: StudyJob) -> Row:
    """One training, or the times of all formats."""
    args = job.args
    if args["what"] == "speed":
        return {"times_fp32": speed(num_rounds=args["num_rounds"], num_steps=args["num_steps"])}
    divisor = SETTINGS[args["setting"]]
    done = train(args["format"], divisor=divisor, seed=args["seed"], num_steps=args["num_steps"])
    return {
        "held_out": done.held_out,
        "overflows": done.overflows,
        "underflow": round(done.underflow, 5),
        "saved_bytes": done.saved_bytes,
    }


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Per setting and format."""
    speeds: dict[str, float] = next((row["times_fp32"] for row in rows if row["what"] == "speed"), {})
    lines = [_line(setting, name, rows, speeds) for setting in SETTINGS for name in FORMATS]
    return {"lines": [line for line in lines if line["runs"]], "note": NOTE}


def _line(setting: str, name: str, rows: Sequence[Row], speeds: dict[str, float]) -> dict[str, Any]:
    trained = [row for row in rows if row["what"] == "training" and row["setting"] == setting]
    mine = [row for row in trained if row["format"] == name]
    twins = {row["seed"]: row["held_out"] for row in trained if row["format"] == "fp32"}
    worse = [row["held_out"] - twins[row["seed"]] for row in mine if row["seed"] in twins]
    return {
        "setting": setting,
        "format": name,
        "runs": len(mine),
        "held_out": _mean([row["held_out"] for row in mine]),
        "worse_than_fp32": _mean(worse),
        "failed": sum(not difference < MARGIN for difference in worse),
        "overflows": _mean([row["overflows"] for row in mine]),
        "underflow": _mean([row["underflow"] for row in mine]),
        "saved_bytes": _mean([row["saved_bytes"] for row in mine]),
        "times_fp32": speeds.get(name, math.nan),
    }


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def table(rows: Sequence[Row]) -> RenderableType:
    """What was learned, by setting and format; and what a format costs."""
    lines = summary(rows)["lines"]
    learned = Table(
        title="A small transformer in four number formats",
        caption=f"worse: than fp32 with the same seed, in nats; failed: NaN, or {MARGIN} worse; overflows: updates per "
        "run whose gradients were not finite; zeros: share of the gradient",
    )
    _columns(learned, ("training on", "format"), ("loss", "worse", "failed", "overflows", "zeros"))
    for before, line in zip([None, *lines], lines, strict=False):
        new = before is None or before["setting"] != line["setting"]
        if new and before is not None:
            learned.add_section()
        learned.add_row(
            line["setting"] if new else "",
            line["format"],
            f"{line['held_out']:.3f}",
            f"{line['worse_than_fp32']:+.3f}",
            f"[{'red' if line['failed'] else 'green'}]{line['failed']}/{line['runs']}[/]",
            f"{line['overflows']:.1f}",
            f"{line['underflow']:.1%}",
        )
    cost = Table(title="Cost of a step", caption=NOTE)
    _columns(cost, ("format",), ("saved for backward", "of fp32", "time on this CPU"))
    whole = next((line["saved_bytes"] for line in lines if line["format"] == "fp32"), math.nan)
    for line in {line["format"]: line for line in lines}.values():
        cost.add_row(
            line["format"],
            f"{line['saved_bytes'] / 1024:.0f} KiB",
            f"{line['saved_bytes'] / whole:.0%}",
            f"{line['times_fp32']:.1f} x fp32",
        )
    return Group(learned, "", cost)


def _columns(shown: Table, left: Sequence[str], right: Sequence[str]) -> None:
    for column in (*left, *right):
        shown.add_column(column, justify="left" if column in left else "right", no_wrap=True)


def figure(rows: Sequence[Row], path: Path) -> None:
    """Loss and zeros, by format and setting."""
    plt = pyplot()
    lines = summary(rows)["lines"]
    drawing, panels = plt.subplots(1, 2, figsize=(10, 3.4))
    names = list(FORMATS)
    for panel, what, label in zip(
        panels, ("held_out", "underflow"), ("held-out loss, nats per byte", "zeros in the gradient"), strict=True
    ):
        for shift, setting in ((-0.2, "loss"), (0.2, "loss / 4096")):
            values = {line["format"]: line[what] for line in lines if line["setting"] == setting}
            places = [names.index(name) + shift for name in values]
            panel.bar(places, list(values.values()), width=0.38, label=f"training on {setting}")
        panel.set_xticks(range(len(names)), names, fontsize=8)
        panel.set_title(label, fontsize=10)
    panels[1].legend(fontsize=8, loc="upper left")
    drawing.tight_layout()
    save_figure(drawing, path)


STUDY = Study(
    name="precision",
    about="fp32, bf16, fp16 with and without loss scaling: loss, overflow, underflow, memory, speed",
    jobs=jobs,
    run=run,
    table=table,
    summary=summary,
    figure=figure,
)
