"""How well the guard judges: quiet where nothing is wrong, in time where something is, and what is left afterwards.

    python benchmarks/judgement.py healthy            # 10 tasks x 10 seeds: interventions, findings, bit-identity
    python benchmarks/judgement.py faults             # held-out loss with a fault, guarded, against twins without it
    python benchmarks/judgement.py slow               # slow divergence: noticed when, and at what cost
    python benchmarks/judgement.py traces             # curves in $STEADYSTEP_TRACES through the detectors alone
    python benchmarks/judgement.py curves --curves D  # writes unguarded curves, to develop detectors on

Seeds 0 to 9 are for developing, 100 to 109 (the default) for reporting. Results are kept in --out, one line per run,
and a run is made again only when the code it depends on has changed; so a study can be stopped and continued. --quick
takes two seeds; --json prints what a program would read.
"""

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from judge import curves, healthy, recovery, slow, traces
from judge.catalogue import CURVES, FAULTS
from judge.jobs import Job, Row, results
from steadystep.lab.tasks import JUDGED, TASKS

_OUT = Path(__file__).parent / "results" / "judgement.jsonl"


def main() -> int:
    args = _arguments()
    if args.study == "traces":
        told = _traces(args)
    else:
        told = {"curves": _curves, "healthy": _healthy, "faults": _faults, "slow": _slow}[args.study](args)
    if args.json:
        print(json.dumps(told))
    return 0


def _healthy(args: argparse.Namespace) -> dict[str, Any]:
    jobs = healthy.jobs(args.tasks, args.seeds, args.steps)
    return healthy.report(results(jobs, healthy.run, out=args.out, workers=args.workers))


def _faults(args: argparse.Namespace) -> dict[str, Any]:
    def made(jobs: list[Job]) -> list[Row]:
        return results(jobs, recovery.run, out=args.out, workers=args.workers)

    return recovery.report(recovery.rows(args.seeds, args.faults, args.tasks, made))


def _slow(args: argparse.Namespace) -> dict[str, Any]:
    return slow.report(results(slow.jobs(args.seeds, args.tasks), slow.run, out=args.out, workers=args.workers))


def _traces(args: argparse.Namespace) -> dict[str, Any]:
    known = [Path(os.environ["STEADYSTEP_TRACES"])] if "STEADYSTEP_TRACES" in os.environ else []
    folders = known + ([args.curves] if args.curves else [])
    if not folders:
        sys.exit("traces: set STEADYSTEP_TRACES to a folder of .csv files, or give --curves DIR")
    return traces.report(folders)


def _curves(args: argparse.Namespace) -> dict[str, Any]:
    if args.curves is None:
        sys.exit("curves: give --curves DIR, the folder to write to")
    steps = args.steps or 2000
    jobs = [Job(study="curves", task=t, seed=s, num_steps=steps, arm="clean") for s in args.seeds for t in args.tasks]
    jobs += [
        Job(study="curves", task=task, seed=seed, num_steps=min(steps, 1000), fault=fault, arm="faulty")
        for seed in args.seeds
        for fault in CURVES
        for task in args.tasks
    ]
    rows = results(jobs, partial(curves.run, folder=args.curves), out=None, workers=args.workers)
    return {"files": [row["file"] for row in rows]}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=["healthy", "faults", "slow", "traces", "curves"])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(100, 110)))
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(JUDGED), metavar="TASK")
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS), metavar="FAULT")
    parser.add_argument("--steps", type=int, help="per run, instead of the task's own number")
    parser.add_argument("--curves", type=Path, help="folder of .npz files")
    parser.add_argument("--out", type=Path, default=_OUT)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.seeds = args.seeds[:2]
    return args


if __name__ == "__main__":
    sys.exit(main())
