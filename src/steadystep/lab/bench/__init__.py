"""The studies behind `steadystep bench`: each is made of jobs, runs on all cores, resumes, and ends in a table.

Running one: what is stored already is not made again, and what is new is stored at once.
"""

import importlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

from steadystep._utils.text import nearest_names
from steadystep.errors import ConfigError
from steadystep.lab.bench.header import Header
from steadystep.lab.bench.study import Choice, JobResult, Row, Study, StudyJob, each

STUDIES: dict[str, str] = {
    "stability": "steadystep.lab.bench.stability:STUDY",
    "precision": "steadystep.lab.bench.precision:STUDY",
    "detection": "steadystep.lab.bench.detection:STUDY",
    "recovery": "steadystep.lab.bench.recovery:STUDY",
    "overhead": "steadystep.lab.bench.overhead:STUDY",
    "rl": "steadystep.lab.bench.rl:STUDY",
}
"""Where each is; imported when it is asked for, since most need torch."""


def load(name: str) -> Study:
    """A study by its name."""
    if name not in STUDIES:
        raise ConfigError(f"bench {name!r} is unknown{nearest_names(name, list(STUDIES), count=len(STUDIES))}")
    module, _, member = STUDIES[name].partition(":")
    try:
        found: Study = getattr(importlib.import_module(module), member)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ConfigError(f"bench {name} is not built yet") from None
    return found


__all__ = ["STUDIES", "Choice", "Row", "Study", "StudyJob", "load"]


def results_file(folder: Path, study: str, choice: Choice) -> Path:
    """NAME.jsonl, or NAME-quick.jsonl."""
    return folder / f"{study}{'-quick' if choice.quick else ''}.jsonl"


@final
class Store:
    """The rows of one results file by key, in the order they came."""

    def __init__(self, path: Path, header: Header, rows: dict[str, Row]) -> None:
        self.path, self.header, self.rows = path, header, rows

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """What is in the file; None when there is none."""
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except UnicodeDecodeError:
            text = ""
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
        entries = list(_entries(text))
        try:
            header = Header.read(entries[0]["header"])
        except (IndexError, KeyError, TypeError, AttributeError, ValueError):
            raise ConfigError(
                f"{path}: not a results file of steadystep bench: use another --out, or --fresh"
            ) from None
        return cls(path, header, {entry["key"]: entry["row"] for entry in entries[1:] if _is_row(entry)})

    @classmethod
    def open(cls, path: Path, header: Header, *, fresh: bool) -> Self:
        """The file to go on with, or a new one. Rows made with other code or settings are never mixed with ours."""
        found = None if fresh else cls.read(path)
        if found is not None:
            apart = found.header.differences(header)
            if apart:
                raise ConfigError(
                    f"{path} contains other results: {'; '.join(apart)}. Use --fresh to replace them, --out DIR to "
                    "keep them, --table to show them"
                )
            _end_the_last_line(path)
            return found
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"header": header.as_dict()}) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None
        return cls(path, header, {})

    def add(self, key: str, row: Row) -> None:
        """Write it down at once."""
        self.rows[key] = row
        with self.path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"key": key, "row": row}) + "\n")


def _entries(text: str) -> Iterator[Row]:
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):  # a line that was being written when the power went
            continue
        if isinstance(entry, dict):
            yield entry


def _is_row(entry: Row) -> bool:
    return isinstance(entry.get("key"), str) and isinstance(entry.get("row"), dict)


def _end_the_last_line(path: Path) -> None:
    if not path.read_bytes().endswith(b"\n"):
        with path.open("a", encoding="utf-8") as lines:
            lines.write("\n")


OnResult = Callable[[int, int, JobResult | None], None]
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
    failed: tuple[JobResult, ...] = ()


def run(
    study: Study,
    choice: Choice,
    *,
    out: Path,
    num_workers: int | None = None,
    fresh: bool = False,
    watch: OnResult = lambda made, total, done: None,
) -> Results:
    """Make what is missing. Stopping in between loses only the jobs that were under way."""
    workers = _num_workers(study, num_workers)
    store = Store.open(results_file(out, study.store or study.name, choice), Header.now(study, choice), fresh=fresh)
    failed: list[JobResult] = []
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
        raise ConfigError(f"{path} contains no results yet: run steadystep bench {study.name}{quick}")
    seeds = store.header.settings.get("seeds")
    asked = Choice(quick=choice.quick, seeds=None if seeds is None else tuple(seeds))
    jobs = list(study.jobs(asked))
    while new := _followers(study, asked, jobs, store):
        jobs += new
    found = _results(jobs, store)
    if not found.rows:
        raise ConfigError(
            f"{path} contains results of another version of this benchmark only: replace them with --fresh"
        )
    return found


def _make(
    study: Study, jobs: list[StudyJob], store: Store, failed: list[JobResult], workers: int, watch: OnResult
) -> None:
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


def _followers(study: Study, choice: Choice, jobs: list[StudyJob], store: Store) -> list[StudyJob]:
    known = {job.key for job in jobs}
    assert len(known) == len(jobs), "two jobs of a study have the same key"
    if study.then is None:
        return []
    rows = [store.rows[job.key] for job in jobs if job.key in store.rows]
    return [job for job in study.then(choice, rows) if job.key not in known]


def _results(jobs: list[StudyJob], store: Store, failed: Sequence[JobResult] = ()) -> Results:
    rows = tuple(store.rows[job.key] for job in jobs if job.key in store.rows)
    return Results(header=store.header, rows=rows, total=len(jobs), failed=tuple(failed))


def _num_workers(study: Study, asked: int | None) -> int:
    if study.alone:
        if asked not in (None, 1):
            raise ConfigError(f"--jobs {asked}: bench {study.name} measures time and runs in one process: omit --jobs")
        return 1
    if asked:
        return asked
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
