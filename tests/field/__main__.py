"""Run the field: `python -m tests.field --half develop --count 400 --jobs 2 --out build/field.jsonl`."""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import steadystep
from steadystep.lab.bench.study import StudyJob, each
from tests.field import table
from tests.field.plan import Run, healthy_runs, run_of, runs
from tests.field.row import for_json, made, made_alone
from tests.field.verdict import Row

_NUMBERS = ("plain_score", "guarded_score", "clean_score", "start_score", "spread")


def main() -> int:
    """Run what is missing, then print the table. Return 1 if a run fails."""
    asked = _arguments()
    if asked.table is not None:
        print(table.report(_chosen(list(read(asked.table).values()), asked)))  # noqa: T201
        return 0
    wanted = _wanted(asked)
    wanted = [run for run in wanted if _is_asked_for(asdict(run), asked)]
    stored = {} if asked.only or asked.fresh else read(asked.out)
    if asked.fresh and not (asked.only or asked.task or asked.face or asked.fault):
        asked.out.unlink(missing_ok=True)  # why not with a filter: a new row takes the place of the old one in any case
    # why not by index alone: the plan may have changed since
    kept = {run.index: stored[run.index] for run in wanted if asdict(run).items() <= stored.get(run.index, {}).items()}
    rows_by_index = kept | _make([run for run in wanted if run.index not in kept], asked)
    rows = [rows_by_index[run.index] for run in wanted if run.index in rows_by_index]
    print(table.report(rows))  # noqa: T201
    return int(any(table.offends(row) for row in rows))


def _wanted(asked: argparse.Namespace) -> list[Run]:
    if asked.only:
        return [run_of(index) for index in asked.only]
    return list(runs(asked.count, asked.half) if asked.alarms is None else healthy_runs(asked.alarms))


def _make(wanted: Sequence[Run], asked: argparse.Namespace) -> dict[int, Row]:
    jobs = [StudyJob(key=str(run.index), args=asdict(run)) for run in wanted]
    found: dict[int, Row] = {}
    began, code = time.monotonic(), code_hash()
    work = made if asked.alarms is None else made_alone
    for number, done in enumerate(each(work, jobs, num_workers=asked.jobs), start=1):
        index = int(done.job.key)
        if done.row is None:
            _say(f"run {index} of the harness failed:\n{done.error}")
            continue
        row = done.row | {"code": code}
        found[index] = row
        if asked.only:
            _say(json.dumps(for_json(row), indent=2))
        else:
            with _opened(asked.out) as lines:
                lines.write(json.dumps(for_json(row)) + "\n")
        minutes = (time.monotonic() - began) / 60
        left = minutes / number * (len(jobs) - number)
        failing = "FAILS " + table.line_of(row) if table.offends(row) else ""
        _say(f"{number}/{len(jobs)} run {index} {row['seconds']:.0f} s, {left:.0f} min left {failing}")
    return found


def read(path: Path) -> dict[int, Row]:
    """Stored rows by index; a line that was being written when the power went is left out."""
    rows: dict[int, Row] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows[row["index"]] = row | {key: float(row[key]) for key in _NUMBERS}
    return rows


def code_hash() -> str:
    """Eight digits that change with any file of the package or of the field."""
    folders = [Path(steadystep.__file__).parent, Path(__file__).parent]
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.field", description=__doc__)
    parser.add_argument("--half", choices=("develop", "sealed", "both"), default="develop")
    parser.add_argument("--count", type=int, default=400, help="indices of the plan; a half has half of them")
    parser.add_argument(
        "--alarms",
        type=int,
        metavar="STEPS",
        help="so many steps of fresh healthy programs, guarded only: false alarms",
    )
    parser.add_argument("--jobs", type=int, default=2, help="worker processes")
    parser.add_argument(
        "--out", type=Path, default=Path("build/field.jsonl"), help="rows stored here are not made again"
    )
    parser.add_argument("--fresh", action="store_true", help="forget stored rows")
    parser.add_argument("--table", type=Path, metavar="FILE", help="only print the table of stored rows")
    parser.add_argument("--only", type=int, nargs="+", default=[], metavar="INDEX", help="run these, show whole rows")
    for key in ("task", "face", "fault"):
        parser.add_argument(
            f"--{key}", nargs="+", default=[], help="only these" + (" (none: healthy)" * (key == "fault"))
        )
    return parser.parse_args()


def _chosen(rows: Sequence[Row], asked: argparse.Namespace) -> list[Row]:
    return sorted((row for row in rows if _is_asked_for(row, asked)), key=lambda row: row["index"])


def _is_asked_for(row: Row, asked: argparse.Namespace) -> bool:
    return all(
        not getattr(asked, key) or str(row[key] or "none") in getattr(asked, key) for key in ("task", "face", "fault")
    )


def _opened(path: Path) -> Any:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a", encoding="utf-8")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
