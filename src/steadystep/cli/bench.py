"""`steadystep bench`: the tables: stability, precision, detection, recovery, overhead, rl."""

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, final

import typer

from steadystep._utils.numbers import with_words
from steadystep.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from steadystep.lab.bench import Results
    from steadystep.lab.bench.study import Choice, JobResult, Study


def bench(
    what: str = typer.Argument(help="Benchmark to run: stability, precision, detection, recovery, overhead or rl."),
    quick: bool = typer.Option(False, "--quick", help="Smoke test with a few seeds and steps."),
    seeds: str = typer.Option("", help="Seeds, such as 0-2 or 0,3,7. Default: those of the benchmark."),
    jobs: int = typer.Option(0, min=0, help="Number of processes; 0 for one per core."),
    out: str = typer.Option("benchmarks/results", help="Folder of the results."),
    fresh: bool = typer.Option(False, "--fresh", help="Discard stored results and start over."),
    table: bool = typer.Option(False, "--table", help="Show stored results without running anything."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of text."),
    figure: str = typer.Option("", help="Plot the results to this file (.png, .svg, .pdf)."),
) -> None:
    """Run one of the benchmarks: stability, precision, detection, recovery, overhead or rl.

    Each run is stored when it ends; after Ctrl-C the same command continues from there.
    Exit code 0: done. 1: some runs failed. 2: an error in the command. 130: Ctrl-C.

    Example: steadystep bench stability --quick
    """
    from steadystep.lab.bench import Choice, load
    from steadystep.lab.bench.study import parse_seeds

    choice = Choice(quick=quick, seeds=parse_seeds(seeds) if seeds else None)
    raise typer.Exit(
        show(
            load(what),
            choice,
            out=Path(out),
            num_workers=jobs or None,
            fresh=fresh,
            only_stored=table,
            as_json=as_json,
            figure=Path(figure) if figure else None,
        )
    )


_LINE_EVERY_S = 10.0  # where there is no terminal
_WIDTH_OF_FILES = 180  # columns: the widest table, of which 80 leave single letters
_DRAWN = (".png", ".svg", ".pdf")


def show(
    study: "Study",
    choice: "Choice",
    *,
    out: Path,
    num_workers: int | None,
    fresh: bool,
    only_stored: bool,
    as_json: bool,
    figure: Path | None,
) -> int:
    """Run a study or read what is stored, and tell; the exit code."""
    from rich.console import Console

    from steadystep.lab.bench import run, stored

    _check_figure(study, figure)
    aside = Console(stderr=True, highlight=False)
    if only_stored:
        results = stored(study, choice, out=out)
    else:
        try:
            with _Screen(aside, study.name) as screen:
                results = run(study, choice, out=out, num_workers=num_workers, fresh=fresh, watch=screen.watch)
        except KeyboardInterrupt:
            aside.print("stopped; completed runs are stored, and the same command continues from there", soft_wrap=True)
            return 130
    _tell(study, results, as_json=as_json)
    if figure is not None and study.figure is not None and results.rows:
        study.figure(results.rows, figure)
        aside.print(f"wrote {figure}", soft_wrap=True)
    for done in results.failed:
        aside.print(f"[red]failed[/red] {done.job.key}\n{done.error}", soft_wrap=True)
    return 1 if results.failed else 0


def _check_figure(study: "Study", figure: Path | None) -> None:
    """Before hours of work, not after."""
    if figure is None:
        return
    if study.figure is None:
        raise ConfigError(f"--figure: bench {study.name} has no figure")
    if figure.suffix not in _DRAWN:
        raise ConfigError(f"--figure {figure}: must end in one of {', '.join(_DRAWN)}")
    if not figure.parent.is_dir():
        raise ConfigError(f"--figure {figure}: no folder {figure.parent}")
    from steadystep.lab.bench.study import pyplot

    pyplot()


def _tell(study: "Study", results: "Results", *, as_json: bool) -> None:
    if as_json:
        told = {
            **results.header.as_dict(),
            "runs": len(results.rows),
            "total": results.total,
            "failed": [done.job.key for done in results.failed],
            "summary": study.summary(results.rows) if results.rows else {},
        }
        sys.stdout.write(json.dumps(with_words(told)) + "\n")
        return
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH_OF_FILES
    if results.rows:
        console.print(study.table(results.rows))
    if len(results.rows) < results.total:
        console.print(f"[yellow]{len(results.rows)} of {results.total} runs so far[/yellow]")
    console.print(f"[dim]{results.header}[/dim]", soft_wrap=True)


@final
class _Screen:
    """A bar on a terminal, else a line now and then, with the time that is left."""

    def __init__(self, console: "Console", name: str) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._console, self._name = console, name
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(name, total=None, said="")
        self._began = self._last = time.monotonic()

    def __enter__(self) -> "_Screen":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def watch(self, made: int, total: int, done: "JobResult | None") -> None:
        """One job more, or a new round of them."""
        now = time.monotonic()
        if done is None:
            self._began = now
        said = f"{_clock((now - self._began) / made * (total - made))} left" if made else "first runs in progress"
        if done is not None and done.row is None:
            self._console.print(f"[red]failed[/red] {done.job.key}", soft_wrap=True)
        self._bar.update(self._task, completed=made, total=total, said=said)
        if not self._console.is_terminal and (done is None or made == total or now - self._last >= _LINE_EVERY_S):
            self._last = now
            self._console.print(f"{self._name}  {made}/{total} runs  {said}", soft_wrap=True)


def _clock(seconds: float) -> str:
    """7:05, or 1:02:03.

    >>> _clock(425.2), _clock(3723)
    ('7:05', '1:02:03')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
