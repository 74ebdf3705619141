"""`steadystep examine`: experiments with a job that a factory makes."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from rich.console import Console

from steadystep.cli.diagnose import printable
from steadystep.diagnosis import Cause
from steadystep.errors import TrainingHalted
from steadystep.guard import Guard
from steadystep.lab.tasks import FACTORIES
from steadystep.train.job import make

FAULTY = 1


def run(
    factory: str,
    *,
    after: int,
    steps: int,
    seconds: float,
    max_grad_norm: float | None,
    seed: int,
    as_json: bool,
) -> int:
    """Build, train a little if asked to, experiment, print; returns the exit code: 0 healthy, 1 a fault was found."""
    job = make(factory, seed, FACTORIES)
    if factory in FACTORIES:
        torch.set_num_threads(1)  # why: matrices this small are slower on two threads
    console = Console(soft_wrap=True, highlight=False)
    training = {} if max_grad_norm is None else {"max_grad_norm": max_grad_norm}
    with (
        Guard(job.model, job.optimizer, config={"mode": "observe", "training": training}) as guard,
        _status() as status,
    ):
        try:
            for number, batch in enumerate(islice(_endless(job.batches), after)):
                guard.step(job.loss, batch=batch)
                status(f"training first: step {number + 1} of {after}")
                if job.after_step is not None:
                    job.after_step()
        except TrainingHalted as error:
            console.print(f"halted while training first: {error}", markup=False)
        done = guard.examine(
            job.batches, loss=job.loss, num_steps=steps, max_seconds=seconds, seed=seed, progress=status
        )
    said = json.dumps(done.to_json()) if as_json else "\n".join(map(printable, str(done).split("\n")))
    console.print(said, markup=False)
    return 0 if all(found.cause == Cause.HEALTHY for found in done.causes) else FAULTY


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """One line on the error stream that is replaced by the next."""
    with Console(stderr=True).status("building the job ...") as status:
        yield lambda line: status.update(f"{line} ...")


def _endless(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            return
