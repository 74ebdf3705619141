"""Many runs: on several processes, each result on disk as soon as it is there, none computed twice."""

import json
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


def results(jobs: Sequence[Any], work: Callable[[Any], Row], *, out: Path | None, workers: int) -> list[Row]:
    """The job's fields and its result, for each job and in their order. A job is a frozen dataclass with a `key`."""
    known = _read(out)
    keys = {job: job.key for job in jobs}
    wanted = [job for job in keys if keys[job] not in known]
    started = time.monotonic()
    for done, (job, row) in enumerate(_mapped(partial(_work, work), wanted, workers), start=1):
        known[keys[job]] = row
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            with out.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"key": keys[job], "row": row}) + "\n")
        _progress(done, len(wanted), time.monotonic() - started)
    return [known[keys[job]] for job in jobs]


def _progress(done: int, total: int, seconds: float) -> None:
    live = sys.stderr.isatty()
    if live or done == total or done % max(1, total // 10) == 0:
        note = f"{done}/{total} runs, {seconds / done * (total - done):.0f} s to go"
        print(
            f"\r{note}   " if live and done < total else note,
            end="" if live and done < total else "\n",
            file=sys.stderr,
            flush=True,
        )


def _read(out: Path | None) -> dict[str, Row]:
    if out is None or not out.exists():
        return {}
    rows = {}
    for line in out.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
            rows[entry["key"]] = entry["row"]
        except (ValueError, KeyError):  # a line that was being written when the last run was stopped
            continue
    return rows


def _mapped(work: Callable[[Any], tuple[Any, Row]], jobs: Sequence[Any], workers: int) -> Any:
    if workers <= 1 or len(jobs) <= 1:
        _prepare()
        yield from map(work, jobs)
        return
    with multiprocessing.get_context("spawn").Pool(workers, initializer=_prepare) as pool:
        yield from pool.imap_unordered(work, jobs)


def _prepare() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def _work(work: Callable[[Any], Row], job: Any) -> tuple[Any, Row]:
    return job, asdict(job) | work(job)
