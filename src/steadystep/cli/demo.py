"""`steadystep demo`: the same small transformer three times: healthy, broken, and broken with a guard."""

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from steadystep.faults import Fault, flipped_bit, scaled_gradients
from steadystep.guard import Guard
from steadystep.lab.gpt import GPT, GPTSize
from steadystep.lab.text import TopicsText
from steadystep.records import Diagnosis, Outcome

SIZE = GPTSize()
BATCH_SIZE = 16
LEARNING_RATE = 3e-3
BROKEN = "norm.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """When what goes wrong."""

    steps: int
    spike_at: int
    flip_at: int

    def faults(self, model: GPT) -> tuple[Fault, ...]:
        """The exercise, and something worse."""
        return (
            scaled_gradients(model, steps={self.spike_at}, factor=10.0),
            flipped_bit(model, steps={self.flip_at}, parameter=BROKEN),
        )


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
    story = Story(steps=steps, spike_at=steps * 5 // 7, flip_at=steps * 6 // 7)
    num_parameters = sum(p.numel() for p in GPT(SIZE).parameters())
    console.print(
        f"A transformer of {num_parameters:,} parameters learns Python's help texts in {steps} steps.\n"
        f"At step {story.spike_at} all gradients are multiplied by 10.\n"
        f"At step {story.flip_at} one bit flips in one weight, as failing memory does.\n"
    )
    logging.getLogger("steadystep").setLevel(logging.ERROR)  # this screen tells the story itself
    results = {
        "no fault": _train(console, "no fault", story, seed=seed, faulty=False, guarded=False),
        "unguarded": _train(console, "unguarded", story, seed=seed, faulty=True, guarded=False),
        "guarded": _train(console, "guarded", story, seed=seed, faulty=True, guarded=True),
    }
    console.print()
    console.print(_table(results, steps=steps))


def _train(console: Console, label: str, story: Story, *, seed: int, faulty: bool, guarded: bool) -> Result:
    torch.manual_seed(seed)
    model = GPT(SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    text = TopicsText(context=SIZE.context, batch_size=BATCH_SIZE, seed=seed)
    guard = Guard(model, optimizer) if guarded else None
    faults = story.faults(model) if faulty else ()
    updates, lost, started = 0, False, time.perf_counter()
    with _progress(console) as bar:
        task = bar.add_task(label, total=story.steps, loss="")
        for step in range(story.steps):
            batch = text.batch()
            with ExitStack() as stack:
                for fault in faults:
                    stack.enter_context(fault.at(step))
                if guard is None:
                    loss = model.loss(batch)
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    optimizer.zero_grad()
                    value, updates = loss.item(), updates + 1
                else:
                    outcome = guard.step(lambda batch=batch: model.loss(batch))
                    value, updates = outcome.loss, guard.updates
                    if not outcome.plan.proceeds:
                        bar.console.print(_caught(outcome))
            if guard is None and value != value and not lost:
                lost = True
                bar.console.print(f"  [red]step {step}[/red] the loss is NaN; everything learned is lost")
            bar.update(task, advance=1, loss=f"loss {value:.3f}")
    if guard is not None:
        console.print(_verdict(guard.diagnose()))
    with torch.no_grad():
        held_out = model.loss(text.held_out()).item()
    healthy = all(bool(p.isfinite().all()) for p in model.parameters())
    return Result(held_out=held_out, updates=updates, healthy_weights=healthy, seconds=time.perf_counter() - started)


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
    card.add_row("      done", _done(outcome))
    return card


def _done(outcome: Outcome) -> str:
    plan = outcome.plan
    if outcome.restored is not None:
        return (
            f"went back to the weights of step {plan.to}; learning rate at most {plan.lr:.2g} until it is steady again"
        )
    if plan.norm is not None:
        return f"gradient scaled down to {plan.norm:.3g}; the update is taken"
    return "no update: as if this batch had never been seen"


def _verdict(found: tuple[Diagnosis, ...]) -> Table:
    card = Table.grid(padding=(0, 1))
    card.add_row("  [bold]diagnose()[/bold]", "")
    for diagnosis in found[:3]:
        card.add_row(f"  {diagnosis.cause}", diagnosis.advice)
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
            "[green]finite[/green]" if result.healthy_weights else "[red]lost[/red]",
            f"{result.seconds:.1f} s",
        )
    return table
