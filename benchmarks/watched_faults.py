"""Five programs with one line more, and seven faults in each: is anything lost?

Each program is run clean, with each fault and nobody watching, and with each fault under `steadystep.watch`. A run is
good when its held-out loss is at most 1 % above that of its clean twin, and bad when it is more than 1 % above that of
the unguarded run. Wanted: 32 of 35 good, none bad. Seeded; the clean run must be bit-identical under `watch`. Run:

    python benchmarks/watched_faults.py                          # all, a few minutes
    python benchmarks/watched_faults.py --only "LSTM" --seed 3   # one program
    python benchmarks/watched_faults.py --json                   # for a program
"""

import argparse
import json
import math
import sys
from typing import Any

import torch

from steadystep import TrainingHalted
from struck.programs import PROGRAMS, Program
from struck.trouble import FAULTS, Trouble

NEAR = 1.01


def run(program: Program, fault: str | None, *, seed: int, watched: bool) -> tuple[float, list[Any]]:
    """The held-out loss (NaN when it halted), and what the watcher did."""
    at = int(program.steps * (0.35 + 0.3 * ((seed * 7919 + 31 * len(fault or "")) % 101) / 100))
    trouble = Trouble(fault, at=at, seed=seed, watched=watched)
    try:
        score = program.run(seed, trouble)
    except TrainingHalted:
        score = math.nan
    finally:
        trouble.close()
    return score, trouble.acts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="the name of one program")
    parser.add_argument("--fault", help="the name of one fault")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    same = True
    for program in [p for p in PROGRAMS if options.only in (None, p.name)]:
        clean, _ = run(program, None, seed=options.seed, watched=False)
        kept, acts = run(program, None, seed=options.seed, watched=True)
        same = same and kept == clean and not acts
        if not options.json:
            print(f"{program.name}: clean {clean:.4f}, watched {'the same' if kept == clean else kept} {acts or ''}")
        for fault in [f for f in FAULTS if options.fault in (None, f)]:
            plain, _ = run(program, fault, seed=options.seed, watched=False)
            score, acts = run(program, fault, seed=options.seed, watched=True)
            good = score <= NEAR * clean
            bad = math.isfinite(plain) and not score <= NEAR * plain
            row = {"program": program.name, "fault": fault, "clean": clean, "unguarded": plain, "watched": score}
            rows.append({**row, "good": good, "bad": bad, "acts": acts})
            if not options.json:
                word = "BAD " if bad else "good" if good else "lost"
                of_clean = f"{score / clean:6.3f} of clean, unguarded {plain / clean:8.3f}"
                print(f"  {word} {fault:<15} {of_clean}  {acts[:3]}", flush=True)
    num_good, num_bad = sum(row["good"] for row in rows), sum(row["bad"] for row in rows)
    if options.json:
        print(json.dumps({"torch": torch.__version__, "good": num_good, "of": len(rows), "bad": num_bad, "rows": rows}))
    else:
        print(f"{num_good} of {len(rows)} within 1 % of the clean twin, {num_bad} worse than unguarded")
    return 0 if same and not num_bad and num_good * 35 >= 32 * len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
