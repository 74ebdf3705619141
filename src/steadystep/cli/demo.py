"""`steadystep demo`: the same small transformer three times: healthy, broken in four ways, and broken with a guard."""

import json
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, final

import torch
import typer
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from steadystep._utils.numbers import with_words
from steadystep._utils.text import quiet_log, state_of
from steadystep.config import Config, MonitoringSettings, observe
from steadystep.errors import ConfigError
from steadystep.faults import Fault, bad_weight, flipped_bit, scaled_gradients, scaled_lr
from steadystep.guard import Guard
from steadystep.lab.tasks.text import GPT, GPTSize, TopicsText
from steadystep.records import Action, Diagnosis, Outcome

SIZE = GPTSize()
BATCH_SIZE = 16
LEARNING_RATE = 3e-3
BROKEN, DAMAGED = "norm.weight", "head.weight"

Arm = Literal["no fault", "unguarded", "guarded"]
OnOutcome = Callable[[Outcome], None]
_FULL = MonitoringSettings(corruption_checks="full")
_ARMS: tuple[Arm, ...] = ("no fault", "unguarded", "guarded")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """When what goes wrong."""

    steps: int = 700

    @property
    def spike_at(self) -> int:
        """All gradients are multiplied by ten once."""
        return self.steps * 5 // 7

    @property
    def leap(self) -> range:
        """The learning rate is a hundred times too high."""
        start = self.steps * 4 // 5
        return range(start, start + self.steps // 35)

    @property
    def small_flip_at(self) -> int:
        """One bit of the mantissa of one weight flips."""
        return self.steps * 2 // 7

    @property
    def write_at(self) -> int:
        """Something else writes into a weight."""
        return self.steps * 32 // 35

    def faults(self, model: GPT, optimizer: torch.optim.Optimizer) -> tuple[Fault, ...]:
        """The exercise, one that no loss shows, and two nastier ones."""
        return (
            flipped_bit(model, steps={self.small_flip_at}, parameter=DAMAGED, element=1000, bit=20),
            scaled_gradients(model, steps={self.spike_at}, factor=10.0),
            scaled_lr(optimizer, steps=self.leap, factor=100.0),
            bad_weight(model, steps={self.write_at}, value=3e38, parameter=BROKEN, element=0),
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StoryEnd:
    """How one run ended."""

    held_out: float
    updates: int
    finite: bool
    seconds: float
    diagnoses: tuple[Diagnosis, ...]


def live(story: Story, arm: Arm, *, seed: int, run_dir: Path, watch: OnOutcome) -> StoryEnd:
    """One of the three runs. Those without a guard have one that only looks: the same bits, and a log to compare."""
    torch.manual_seed(seed)
    model = GPT(SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    text = TopicsText(context=SIZE.context, batch_size=BATCH_SIZE, seed=seed)
    faults = () if arm == "no fault" else story.faults(model, optimizer)
    config: Config = Config(mode="autopilot", monitoring=_FULL) if arm == "guarded" else observe()
    started = time.perf_counter()
    with Guard(model, optimizer, config=config, run_dir=run_dir) as guard:
        for step in range(story.steps):
            batch = text.batch()
            with ExitStack() as stack:
                for fault in faults:
                    stack.enter_context(fault.at(step))
                watch(guard.step(model.loss, batch=batch))
        with torch.no_grad():
            held_out = model.loss(text.held_out()).item()  # sync: once a run
        guard.validate(held_out)
        diagnoses = guard.diagnose()
        finite = all(bool(p.isfinite().all()) for p in model.parameters())  # sync: once a run
        return StoryEnd(
            held_out=held_out if finite else math.nan,
            updates=guard.updates,
            finite=finite,
            seconds=time.perf_counter() - started,
            diagnoses=diagnoses,
        )


def num_parameters() -> int:
    """Of the model."""
    return sum(p.numel() for p in GPT(SIZE).parameters())


def run(*, steps: int, seed: int, run_dir: str, as_json: bool = False) -> None:
    """The three runs, with progress, a table and a page at the end; for a program, the results as JSON."""
    console = Console(highlight=False, stderr=as_json)
    folder = _free(Path(run_dir))
    story = Story(steps=steps)
    console.print(_opening(story))
    torch.set_num_threads(1)  # why: matrices this small are slower on two threads, far slower on a busy machine
    endings: dict[Arm, StoryEnd] = {}
    with quiet_log():
        for arm in _ARMS:
            with _Screen(console, arm, steps) as screen:
                endings[arm] = live(story, arm, seed=seed, run_dir=folder / arm.replace(" ", "-"), watch=screen.watch)
    console.print()
    console.print(_table(endings, steps=steps))
    console.print(_verdict(endings["guarded"]))
    console.print(_pages(folder), soft_wrap=True)
    if as_json:
        told = {arm: {**asdict(end), "diagnoses": [d.cause for d in end.diagnoses]} for arm, end in endings.items()}
        typer.echo(json.dumps(with_words({"run_dir": str(folder), "steps": steps, "runs": told}), indent=2))


def _opening(story: Story) -> str:
    return (
        f"A transformer of {num_parameters():,} parameters is trained on Python's help texts for {story.steps} "
        f"steps.\n  step {story.small_flip_at}  one bit of the mantissa of one weight flips, as in failing memory"
        f"\n  step {story.spike_at}  all gradients are multiplied by 10\n  step {story.leap[0]}  a schedule "
        f"error: the learning rate is multiplied by 100 for {len(story.leap)} steps\n  step {story.write_at}  one "
        "weight is overwritten with 3e38, as a stray write does\n"
    )


def _free(folder: Path) -> Path:
    """A second demo does not write into the first one's folder."""
    names = (folder, *(folder.with_name(f"{folder.name}-{i}") for i in range(2, 1000)))
    free = next((name for name in names if not name.exists()), folder)
    try:
        free.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"{free}: cannot be created ({error.strerror}): choose another folder with --run-dir"
        ) from None
    return free


@final
class _Screen:
    """One run as it goes by: a bar, and a card for each time the guard did something."""

    def __init__(self, console: Console, arm: Arm, steps: int) -> None:
        self._arm = arm
        self._lost = False
        self._shown: Outcome | None = None
        self._bar = Progress(
            TextColumn("{task.description:>9}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task(arm, total=steps, loss="")

    def __enter__(self) -> "_Screen":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def watch(self, outcome: Outcome) -> None:
        """One step more."""
        self._bar.update(self._task, advance=1, loss=f"loss {outcome.loss:.3f}")
        flipped = self._arm == "guarded" and outcome.signals is not None and outcome.signals.bit_flips
        if flipped or not outcome.plan.proceeds:
            self._show(outcome)
        if self._arm == "unguarded" and outcome.loss != outcome.loss and not self._lost:
            self._lost = True
            self._say(f"  [red]step {outcome.step}[/red] the loss is NaN; everything learned is lost")

    def _show(self, outcome: Outcome) -> None:
        last, self._shown = self._shown, outcome
        alike = last is not None and last.step == outcome.step - 1 and last.plan.actions == outcome.plan.actions
        if not alike:
            self._say(_caught(outcome))

    def _say(self, what: Table | str) -> None:
        self._bar.console.print(what)


def _caught(outcome: Outcome) -> Table:
    card = Table.grid(padding=(0, 1))
    card.add_row(f"  [green]step {outcome.step}[/green]", outcome.diagnosis.evidence)
    card.add_row("     cause", outcome.diagnosis.cause)
    card.add_row("      done", _done(outcome))
    return card


def _done(outcome: Outcome) -> str:
    plan = outcome.plan
    if outcome.restored is not None:
        again = f" and replayed {outcome.replayed} updates" if outcome.replayed else ""
        eased = ", with a lower learning rate at first" if plan.lr is not None else ""
        return f"rolled back to {state_of(plan.to)}{again}{eased}"
    if Action.HOLD_LR in plan.actions:
        return f"updated with the last accepted learning rate, {plan.lr:.2g}"
    if outcome.signals is not None and outcome.signals.bit_flips and outcome.stepped:
        return "bit put back and the gradients computed again: nothing lost"
    if plan.norm is not None:
        return f"gradient scaled down to {plan.norm:.3g}, then updated"
    return "update skipped"


def _table(endings: dict[Arm, StoryEnd], *, steps: int) -> Table:
    clean = endings["no fault"].held_out
    table = Table(title="Three runs, the same data, the same first weights", title_justify="left", title_style="bold")
    for column in ("run", "held-out loss", "vs no fault", "updates", "weights", "time"):
        table.add_column(column, justify="left" if column in ("run", "weights") else "right")
    for arm, ending in endings.items():
        table.add_row(
            arm,
            f"{ending.held_out:.3f}" if ending.finite else "[red]NaN[/red]",
            "" if arm == "no fault" else f"{ending.held_out / clean - 1:+.1%}" if ending.finite else "[red]lost[/red]",
            f"{ending.updates} of {steps}",
            "[green]finite[/green]" if ending.finite else "[red]lost[/red]",
            f"{ending.seconds:.1f} s",
        )
    return table


def _verdict(ending: StoryEnd) -> Group:
    card = Table.grid(padding=(0, 2))
    for diagnosis in ending.diagnoses[:3]:
        card.add_row(f"  {diagnosis.cause}", diagnosis.advice)
    return Group("\n[bold]Diagnosis of the guarded run[/bold]", card)


def _pages(folder: Path) -> str:
    """The guarded run as a page, and all three over each other."""
    try:
        from steadystep.pages.report import compare_page, report_page
        from steadystep.runs.comparison import compare
        from steadystep.runs.open import open_run
    except ImportError as error:
        return f"\nNo report: {error}"
    runs = [open_run(folder / arm.replace(" ", "-")) for arm in _ARMS]
    report, overlay = folder / "report.html", folder / "compare.html"
    try:
        report.write_text(report_page(runs[-1]), encoding="utf-8")
        overlay.write_text(compare_page(runs, compare(runs)), encoding="utf-8")
    except OSError as error:
        return f"\nNo report: {folder} cannot be written ({error.strerror})"
    return f"\nReport of the guarded run: {report}\nComparison of all three:   {overlay}"
