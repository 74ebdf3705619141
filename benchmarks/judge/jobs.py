"""Many runs: on several processes, each result on disk as soon as it is there, none computed twice."""

import hashlib
import json
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, final

import torch

Row = dict[str, Any]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run to make."""

    study: str
    task: str
    seed: int
    num_steps: int
    fault: str = ""
    arm: str = "guarded"
    """guarded, clean, faulty, or missing-0 to missing-2."""
    missing: int = 0
    """How many batches a "missing" twin does without."""

    @property
    def key(self) -> str:
        """What this result depends on: the run itself and the code it ran with."""
        return json.dumps(asdict(self) | {"code": _code(guarded=self.arm == "guarded")}, sort_keys=True)


@cache
def _code(*, guarded: bool) -> str:
    """A digest of the package, or of tasks and faults alone for a run without a guard."""
    here = Path(__file__).parent
    root = here.parent.parent / "src" / "steadystep"
    folders = [root] if guarded else [root / "lab", root / "faults"]
    digest = hashlib.sha256()
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    for path in [here / "catalogue.py", here / "training.py", *files]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def results(jobs: Sequence[Job], work: Callable[[Job], Row], *, out: Path | None, workers: int) -> list[Row]:
    """The job's fields and its result, for each job and in their order."""
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


def _mapped(work: Callable[[Job], tuple[Job, Row]], jobs: Sequence[Job], workers: int) -> Any:
    if workers <= 1 or len(jobs) <= 1:
        _prepare()
        yield from map(work, jobs)
        return
    with multiprocessing.get_context("spawn").Pool(workers, initializer=_prepare) as pool:
        yield from pool.imap_unordered(work, jobs)


def _prepare() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def _work(work: Callable[[Job], Row], job: Job) -> tuple[Job, Row]:
    return job, asdict(job) | work(job)
