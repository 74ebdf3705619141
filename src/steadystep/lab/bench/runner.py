"""Runs a study: what is stored already is not made again, and what is new is stored at once."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from steadystep.errors import ConfigError
from steadystep.lab.bench.header import Header
from steadystep.lab.bench.store import Store, results_file
from steadystep.lab.bench.study import Choice, Job, Row, Study
from steadystep.lab.bench.workers import Done, each

Watch = Callable[[int, int, Done | None], None]
"""Called with jobs made here, jobs to make here, and the last one that ended (None at the beginning)."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What a study has come to."""

    header: Header
    rows: tuple[Row, ...]
    """Of the jobs asked for, in their order."""
    total: int
    """Jobs that the whole study has."""
    failed: tuple[Done, ...] = ()


def run(
    study: Study,
    choice: Choice,
    *,
    out: Path,
    num_workers: int | None = None,
    fresh: bool = False,
    watch: Watch = lambda made, total, done: None,
) -> Results:
    """Make what is missing. Stopping in between loses only the jobs that were under way."""
    workers = _num_workers(study, num_workers)
    store = Store.open(results_file(out, study.store or study.name, choice), Header.now(study, choice), fresh=fresh)
    failed: list[Done] = []
    jobs = list(study.jobs(choice))
    while True:
        _make(study, jobs, store, failed, workers, watch)
        new = _followers(study, choice, jobs, store)
        if not new:
            break
        jobs += new
    return _results(jobs, store, failed)


def stored(study: Study, choice: Choice, *, out: Path) -> Results:
    """What an earlier run has left, whatever code it was made with."""
    path = results_file(out, study.store or study.name, choice)
    store = Store.read(path)
    if store is None or not store.rows:
        quick = " --quick" if choice.quick else ""
        raise ConfigError(f"{path} holds no results yet: make them with steadystep bench {study.name}{quick}")
    seeds = store.header.settings.get("seeds")
    asked = Choice(quick=choice.quick, seeds=None if seeds is None else tuple(seeds))
    jobs = list(study.jobs(asked))
    while new := _followers(study, asked, jobs, store):
        jobs += new
    found = _results(jobs, store)
    if not found.rows:
        raise ConfigError(f"{path} holds results of another version of this study only: --fresh replaces them")
    return found


def _make(study: Study, jobs: list[Job], store: Store, failed: list[Done], workers: int, watch: Watch) -> None:
    over = {*store.rows, *(done.job.key for done in failed)}
    missing = [job for job in jobs if job.key not in over]
    if not missing:
        return
    watch(0, len(missing), None)
    for made, done in enumerate(each(study.run, missing, num_workers=workers), start=1):
        if done.row is None:
            failed.append(done)
        else:
            store.add(done.job.key, done.row)
        watch(made, len(missing), done)


def _followers(study: Study, choice: Choice, jobs: list[Job], store: Store) -> list[Job]:
    known = {job.key for job in jobs}
    assert len(known) == len(jobs), "two jobs of a study have the same key"
    if study.then is None:
        return []
    rows = [store.rows[job.key] for job in jobs if job.key in store.rows]
    return [job for job in study.then(choice, rows) if job.key not in known]


def _results(jobs: list[Job], store: Store, failed: Sequence[Done] = ()) -> Results:
    rows = tuple(store.rows[job.key] for job in jobs if job.key in store.rows)
    return Results(header=store.header, rows=rows, total=len(jobs), failed=tuple(failed))


def _num_workers(study: Study, asked: int | None) -> int:
    if study.alone:
        if asked not in (None, 1):
            raise ConfigError(f"--jobs {asked}: bench {study.name} measures time and runs alone: leave --jobs out")
        return 1
    if asked:
        return asked
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
