"""The rows of the detection and recovery tables on one develop seed, without the arms that hold none of our code."""

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from steadystep.lab.bench.detection import STUDY as DETECTION
from steadystep.lab.bench.recovery import STUDY as RECOVERY
from steadystep.lab.bench.study import Choice, Study, StudyJob
from tests.field.row import for_json, silence
from tests.golden.trace import FROZEN_NAMES

_ARMS = ("clean", "unguarded", "autopilot")
SEED = 7  # seeds 0 to 9 are for developing


def main() -> int:
    """Make the rows that are missing in the file, or compare two files. Returns 1 when they differ."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.studies", description=__doc__)
    parser.add_argument("--out", type=Path, help="one line per run; those that are there are not made again")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--like", type=Path, help="only the runs of this file")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    asked = parser.parse_args()
    if asked.compare:
        return _compare(*(read(path) for path in asked.compare))
    torch.set_num_threads(1)
    made = read(asked.out)
    wanted = _jobs(asked.seed)
    if asked.like:
        wanted = {key: wanted[key] for key in read(asked.like)}
    jobs = {key: found for key, found in wanted.items() if key not in made}
    for number, (key, (study, job)) in enumerate(jobs.items(), start=1):
        with silence():
            row = _compact(study.run(job))
        with asked.out.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"key": key, "row": row}, sort_keys=True) + "\n")
        _say(f"{number}/{len(jobs)} {key}")
    return 0


def read(path: Path) -> dict[str, Any]:
    """Rows by key."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {entry["key"]: entry["row"] for entry in map(json.loads, lines)}


def _jobs(seed: int) -> dict[str, tuple[Study, StudyJob]]:
    """Each run once: both tables share most of theirs."""
    choice = Choice(seeds=(seed,))
    found = {job.key: (study, job) for study in (DETECTION, RECOVERY) for job in study.jobs(choice)}
    return {key: (study, job) for key, (study, job) in found.items() if job.args["arm"] in _ARMS}


def _compact(row: dict[str, Any]) -> dict[str, Any]:
    """Ready for JSON, a curve as its hash."""
    short = {key: value for key, value in row.items() if key != "curve" and value not in ("", {}, [], None)}
    if row.get("curve"):
        short["curve"] = hashlib.sha256(repr(sorted(row["curve"].items())).encode()).hexdigest()[:16]
    if "did" in short:
        short["did"] = {FROZEN_NAMES.get(action, action): count for action, count in short["did"].items()}
    found: dict[str, Any] = for_json(short)
    return found


def _compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    apart = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    for key in apart:
        _say(f"{key}\n  before {json.dumps(before.get(key))}\n  after  {json.dumps(after.get(key))}")
    _say(f"{len(before)} rows before, {len(after)} after, {len(apart)} differ")
    return int(bool(apart))


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
