"""`steadystep demo`: the same small transformer three times: healthy, broken, and broken with a guard."""

from pathlib import Path
from typing import final

import torch
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from steadystep._utils.text import quiet_log, state_of
from steadystep.errors import ConfigError
from steadystep.lab.story import Arm, Story, StoryEnd, live, num_parameters
from steadystep.records import Outcome

_ARMS: tuple[Arm, ...] = ("no fault", "unguarded", "guarded")


def run(*, steps: int, seed: int, run_dir: str) -> None:
    """The three runs, with progress, a table and a page at the end."""
    console = Console(highlight=False)
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


def _opening(story: Story) -> str:
    return (
        f"A transformer of {num_parameters():,} parameters learns Python's help texts in {story.steps} steps.\n"
        f"  step {story.spike_at}  all gradients are multiplied by 10\n"
        f"  step {story.leap[0]}  a wrong schedule: the learning rate times 100 for {len(story.leap)} steps\n"
        f"  step {story.flip_at}  one bit flips in one weight, as failing memory does\n"
    )


def _free(folder: Path) -> Path:
    """A second demo does not write into the first one's folder."""
    names = (folder, *(folder.with_name(f"{folder.name}-{i}") for i in range(2, 1000)))
    free = next((name for name in names if not name.exists()), folder)
    try:
        free.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{free}: cannot be made ({error.strerror}); another place with --run-dir") from None
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
        if not outcome.plan.proceeds:
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
        again = f" and made the {outcome.replayed} updates since again" if outcome.replayed else ""
        eased = ", eased back in at a lower learning rate" if plan.lr is not None else ""
        return f"went back to {state_of(plan.to)}{again}{eased}"
    if "hold-lr" in plan.actions:
        return f"the update is taken with the last trusted learning rate, {plan.lr:.2g}"
    if plan.norm is not None:
        return f"gradient scaled down to {plan.norm:.3g}; the update is taken"
    return "no update: as if this batch had never been seen"


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
    return Group("\n[bold]What the guard says about it afterwards[/bold]", card)


def _pages(folder: Path) -> str:
    """The guarded run as a page, and all three over each other."""
    try:
        from steadystep.pages.compare import compare_page
        from steadystep.pages.report import report_page
        from steadystep.runs.comparison import compare
        from steadystep.runs.open import open_run
    except ImportError as error:
        return f"\nNo page: {error}"
    runs = [open_run(folder / arm.replace(" ", "-")) for arm in _ARMS]
    report, overlay = folder / "report.html", folder / "compare.html"
    try:
        report.write_text(report_page(runs[-1]), encoding="utf-8")
        overlay.write_text(compare_page(runs, compare(runs)), encoding="utf-8")
    except OSError as error:
        return f"\nNo page: {folder} cannot be written ({error.strerror})"
    return f"\nThe guarded run as a page: {report}\nAll three over each other:  {overlay}"
