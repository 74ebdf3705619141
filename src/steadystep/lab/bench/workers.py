"""Jobs on several processes: one that fails or dies costs its own result and no other."""

import multiprocessing
import signal
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import final

from steadystep.lab.bench.study import Job, Row

Work = Callable[[Job], Row]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """One job is over: it has a row, or else an error."""

    job: Job
    row: Row | None = None
    error: str = ""


def each(work: Work, jobs: Sequence[Job], *, num_workers: int) -> Iterator[Done]:
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

    def __init__(self, work: Work) -> None:
        self._work = work
        self.job: Job | None = None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # why: torch's threads do not survive a fork
        self.pipe, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(target=_serve, args=(self._work, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def give(self, job: Job) -> None:
        """Begin with this job."""
        self.job = job
        self.pipe.send(job)

    def take(self) -> Done:
        """What came out of it; a process that died is replaced."""
        job, self.job = self.job, None
        assert job is not None
        try:
            done: Done = self.pipe.recv()
        except EOFError:
            self._process.join()
            done = Done(job=job, error=f"its process died with exit code {self._process.exitcode}")
            self.pipe.close()
            self._start()
        return done

    def end(self) -> None:
        """At once, whatever it is doing."""
        self._process.terminate()
        self._process.join()
        self.pipe.close()


def _serve(work: Work, pipe: Connection) -> None:
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


def _done(work: Work, job: Job) -> Done:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return Done(job=job, row={**job.args, **work(job)})
        except Exception:
            return Done(job=job, error=traceback.format_exc())
