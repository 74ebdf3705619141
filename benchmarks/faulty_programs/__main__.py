"""Run every program and its twin plainly: `python -m benchmarks.faulty_programs [NAME_PART ...] [--seeds N]`."""

import argparse
import warnings

import torch

from . import EVERY, PROGRAMS, half
from .verify import Row, Run, confirmed, verify

HEAD = f"{'program':44} {'version':7} {'start loss':>10} {'end loss':>10} {'untrained':>9} {'score':>7} steps     s"


def line(row: Row, version: str, run: Run, verdict: str) -> str:
    numbers = f"{run.start_loss:10.4g} {run.end_loss:10.4g} {run.start_score:9.3f} {run.end_score:7.3f}"
    return f"{row.program.name:44} {version:7} {numbers} {run.num_steps:5} {run.seconds:5.1f} {verdict}"


def show(row: Row) -> None:
    if row.faulty is not None:
        print(line(row, "faulty", row.faulty, "fails" if row.fails else "DOES NOT FAIL"))
    print(line(row, "twin", row.twin, "learns" if row.twin_learns else "DOES NOT LEARN"), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="run the programs whose name contains one of these")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--half",
        choices=("develop", "sealed", "unseen", "fresh", "later", "next", "held", "spare"),
        help="default: develop and sealed",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pool = [p for p in EVERY if half(p) == options.half] if options.half else PROGRAMS
    chosen = [p for p in pool if not options.parts or any(part in p.name for part in options.parts)]
    print(HEAD)
    poor = []
    for program in chosen:
        rows = []
        for seed in range(options.seeds):
            rows.append(verify(program, seed))
            show(rows[-1])
        if not confirmed(rows):
            poor.append(program.name)
    print(
        f"{len(chosen) - len(poor)} of {len(chosen)} programs confirmed by at least two of three seeds", *poor, sep="\n"
    )


if __name__ == "__main__":
    main()
