"""What a study is: runs that can be made in any order on any core, and what their results say together."""

import importlib
import multiprocessing
import re
import signal
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, final

from rich.console import RenderableType

from steadystep._utils.text import install
from steadystep.errors import ConfigError

Row = dict[str, Any]
"""One job's arguments and result, ready for JSON."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StudyJob:
    """One piece of work that needs nothing from another."""

    key: str
    """The same job has the same key tomorrow: what is stored under it is not made again."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Plain values: they go to another process and into the row."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the user asked for."""

    quick: bool = False
    """A few seeds and steps: shows that it works, and no more."""
    seeds: tuple[int, ...] | None = None

    def pick(self, *, full: Iterable[int], quick: Iterable[int]) -> tuple[int, ...]:
        """The seeds that were asked for, or else the study's own."""
        if self.seeds is not None:
            return self.seeds
        return tuple(quick if self.quick else full)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One table of `steadystep bench`. All functions must be importable: they are run in other processes."""

    name: str
    about: str
    """One line for `steadystep bench --help`."""
    jobs: Callable[[Choice], Sequence[StudyJob]]
    run: Callable[[StudyJob], Row]
    """With one torch thread, and warnings silenced; what it returns is stored together with the job's arguments."""
    table: Callable[[Sequence[Row]], RenderableType]
    """For people; must also cope with the rows of a study that was stopped half-way."""
    summary: Callable[[Sequence[Row]], dict[str, Any]]
    """For `--json`."""
    figure: Callable[[Sequence[Row], Path], None] | None = None
    then: Callable[[Choice, Sequence[Row]], Sequence[StudyJob]] | None = None
    """Jobs that follow from the rows so far; asked again until nothing new follows."""
    alone: bool = False
    """It measures time: one job after another, in one process."""
    store: str = ""
    """The name of its results file where it shares one with another study; its own name otherwise."""
    parts: tuple[str, ...] = ()
    """Other modules of lab/bench that its rows depend on, such as "rules"; its own, NAME*.py, need no mention."""


JobWork = Callable[[StudyJob], Row]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """One job is over: it has a row, or else an error."""

    job: StudyJob
    row: Row | None = None
    error: str = ""


def each(work: JobWork, jobs: Sequence[StudyJob], *, num_workers: int) -> Iterator[JobResult]:
    """Every job once, in the order in which they end; leaving early ends the processes."""
    if num_workers <= 1 or len(jobs) <= 1:
        _prepare()
        for job in jobs:
            yield _done(work, job)
        return
    waiting, team = deque(jobs), [_Worker(work) for _ in range(min(num_workers, len(jobs)))]
    try:
        for worker in team:
            worker.give(waiting.popleft())
        while busy := [worker for worker in team if worker.job is not None]:
            ready = wait([worker.pipe for worker in busy])
            for worker in busy:
                if worker.pipe in ready:
                    done = worker.take()
                    if waiting:
                        worker.give(waiting.popleft())
                    yield done
    finally:
        for worker in team:
            worker.end()


@final
class _Worker:
    """A process and our end of its pipe."""

    def __init__(self, work: JobWork) -> None:
        self._work = work
        self.job: StudyJob | None = None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # why: torch's threads do not survive a fork
        self.pipe, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(target=_serve, args=(self._work, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def give(self, job: StudyJob) -> None:
        """Begin with this job."""
        self.job = job
        self.pipe.send(job)

    def take(self) -> JobResult:
        """What came out of it; a process that died is replaced."""
        job, self.job = self.job, None
        assert job is not None
        try:
            done: JobResult = self.pipe.recv()
        except EOFError:
            self._process.join()
            done = JobResult(job=job, error=f"its process died with exit code {self._process.exitcode}")
            self.pipe.close()
            self._start()
        return done

    def end(self) -> None:
        """At once, whatever it is doing."""
        self._process.terminate()
        self._process.join()
        self.pipe.close()


def _serve(work: JobWork, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # why: Ctrl-C reaches us too, and the parent ends us properly
    _prepare()
    try:
        while True:
            pipe.send(_done(work, pipe.recv()))
    except (EOFError, BrokenPipeError):  # the parent is gone
        return


def _prepare() -> None:
    import torch

    torch.set_num_threads(1)


def _done(work: JobWork, job: StudyJob) -> JobResult:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return JobResult(job=job, row={**job.args, **work(job)})
        except Exception:
            return JobResult(job=job, error=traceback.format_exc())


_MOST = 10_000


def parse_seeds(text: str) -> tuple[int, ...]:
    """Numbers and ranges with both ends, each seed once.

    >>> parse_seeds("0-2,7,1")
    (0, 1, 2, 7)
    """
    found: list[int] = []
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"--seeds {text!r}: use numbers and ranges, such as 0-2,7")
        if int(match[2] or match[1]) - int(match[1]) + len(found) >= _MOST:
            raise ConfigError(f"--seeds {text!r}: more than {_MOST:,} seeds")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(dict.fromkeys(found))


def save_figure(drawing: Any, path: Any) -> None:
    """As a picture; the drawing is closed."""
    drawing.savefig(path, dpi=150)
    pyplot().close(drawing)


def pyplot() -> Any:
    """The plotting part of matplotlib without a window, or a clear word about how to get it."""
    try:
        importlib.import_module("matplotlib").use("Agg")
    except ModuleNotFoundError:
        raise ConfigError(f"--figure needs matplotlib: {install('lab')}") from None
    return importlib.import_module("matplotlib.pyplot")
