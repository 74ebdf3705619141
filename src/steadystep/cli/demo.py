"""`steadystep demo`: the same small transformer three times: healthy, broken, and broken with a guard."""

import logging
import math
import time
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from steadystep.guard import Guard
from steadystep.lab.gpt import GPT, GPTSize
from steadystep.lab.text import TopicsText
from steadystep.records import Outcome

SIZE = GPTSize()
BATCH_SIZE = 16
LEARNING_RATE = 3e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one run ended."""

    held_out: float
    updates: int
    healthy_weights: bool
    seconds: float


def run(*, steps: int, seed: int) -> None:
    """The three runs, with progress, and a table at the end."""
    console = Console()
    torch.set_num_threads(1)  # why: matrices this small are slower on two threads, far slower on a busy machine
    torch.manual_seed(seed)
    bad_step = steps // 2
    num_parameters = sum(p.numel() for p in GPT(SIZE).parameters())
    console.print(
        f"A transformer of {num_parameters:,} parameters learns Python's help texts in {steps} steps.\n"
        f"At step {bad_step} one element of one gradient becomes NaN: a bad batch, a flaky kernel.\n"
    )
    logging.getLogger("steadystep").setLevel(logging.ERROR)  # this screen tells the story itself
    results = {
        "no fault": _train(console, "no fault", steps=steps, bad_step=None, seed=seed, guarded=False),
        "unguarded": _train(console, "unguarded", steps=steps, bad_step=bad_step, seed=seed, guarded=False),
        "guarded": _train(console, "guarded", steps=steps, bad_step=bad_step, seed=seed, guarded=True),
    }
    console.print()
    console.print(_table(results, steps=steps))


def _train(console: Console, label: str, *, steps: int, bad_step: int | None, seed: int, guarded: bool) -> Result:
    torch.manual_seed(seed)
    model = GPT(SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    text = TopicsText(context=SIZE.context, batch_size=BATCH_SIZE, seed=seed)
    guard = Guard(model, optimizer) if guarded else None
    plant = _NaNOnce(model.get_parameter("blocks.2.qkv.weight"))
    updates, started = 0, time.perf_counter()
    with _progress(console) as bar:
        task = bar.add_task(label, total=steps, loss="")
        for step in range(steps):
            batch = text.batch()
            plant.armed = step == bad_step
            if guard is None:
                loss = model.loss(batch)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                value, updates = loss.item(), updates + 1
                if step == bad_step:
                    bar.console.print(
                        f"  [red]step {step}[/red] a NaN gradient went into the optimizer; nobody noticed"
                    )
            else:
                outcome = guard.step(lambda batch=batch: model.loss(batch))
                value, updates = outcome.loss, guard.updates
                if outcome.findings:
                    bar.console.print(_caught(outcome))
            bar.update(task, advance=1, loss=f"loss {value:.3f}")
    with torch.no_grad():
        held_out = model.loss(text.held_out()).item()
    healthy = all(bool(p.isfinite().all()) for p in model.parameters())
    return Result(held_out=held_out, updates=updates, healthy_weights=healthy, seconds=time.perf_counter() - started)


class _NaNOnce:
    """Makes one gradient element NaN in the backward pass that follows `armed = True`."""

    def __init__(self, parameter: Tensor) -> None:
        self.armed = False
        parameter.register_hook(self._poison)  # type: ignore[no-untyped-call]

    def _poison(self, grad: Tensor) -> Tensor | None:
        if not self.armed:
            return None
        poisoned = grad.clone()
        poisoned.view(-1)[0] = math.nan
        return poisoned


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:>9}"),
        BarColumn(bar_width=40),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
        console=console,
    )


def _caught(outcome: Outcome) -> Table:
    diagnosis = outcome.diagnosis
    card = Table.grid(padding=(0, 1))
    card.add_row(f"  [green]step {outcome.step}[/green]", diagnosis.evidence)
    card.add_row("     cause", diagnosis.cause)
    card.add_row("      done", f"{', '.join(outcome.plan.steps)}: as if this batch had never been seen")
    card.add_row("       try", diagnosis.advice)
    return card


def _table(results: dict[str, Result], *, steps: int) -> Table:
    table = Table()
    for column in ("run", "held-out loss", "updates", "weights", "time"):
        table.add_column(column, justify="left" if column in ("run", "weights") else "right")
    for name, result in results.items():
        table.add_row(
            name,
            f"{result.held_out:.3f}",
            f"{result.updates} of {steps}",
            "[green]finite[/green]" if result.healthy_weights else "[red]NaN[/red]",
            f"{result.seconds:.1f} s",
        )
    return table
