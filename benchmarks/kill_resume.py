"""`kill -9` at random moments: does the resumed run end like the one that nobody killed, to the last bit?

A small program trains (BatchNorm, dropout, EMA weights, random numbers of Python, NumPy and torch in the data, a
shuffling or streaming loader; AdamW or SGD, fp32, bf16 or fp16, accumulation, a schedule, clipping, validation, as
drawn), with a checkpoint every few steps. It is a process of its own and gets a real SIGKILL: from outside after a
random time, or from inside at a random one of the moments that a clock rarely hits: half a file written, before and
after every fsync and rename, in the middle of forward, backward and the update. Some are killed again after resuming.
Then it runs to its end, and weights, buffers, optimizer, EMA, every loss, the guard's memory and the random numbers
must be those of the run that was never killed. Run:

    python benchmarks/kill_resume.py                # 200 runs
    python benchmarks/kill_resume.py --kills 20 --seed 7 --json
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from killing.nursery import Nursery
from killing.trial import KINDS, Told, killed_and_resumed, whole
from killing.variants import drawn


def study(
    nursery: Nursery, kills: int, seed: int, folder: Path, *, progress: Callable[[Told], None] = lambda _: None
) -> list[Told]:
    """So many runs, each killed at least once."""
    rng = random.Random(seed)
    kinds = [kind for _ in range(kills // len(KINDS) + 1) for kind in rng.sample(KINDS, len(KINDS))][:kills]
    told = []
    runs = [whole(nursery, variant, folder) for variant in drawn(seed, min(12, max(1, kills // 3)))]
    for number, kind in enumerate(kinds):
        told.append(killed_and_resumed(nursery, runs[number % len(runs)], folder, kind=kind, rng=rng))
        progress(told[-1])
    return told


def summary(told: Iterable[Told]) -> dict[str, Any]:
    """The numbers."""
    told = list(told)
    return {
        "runs": len(told),
        "equal": sum(one.equal for one in told),
        "unreadable": sum(bool(one.unreadable) for one in told),
        "kills": sum(len(one.kills) for one in told),
        "half_written": sum(one.half_written for one in told),
        "from_the_start": sum(one.from_the_start for one in told),
        "moments": dict(Counter(kind for one in told for kind in one.kills).most_common()),
        "wrong": [what for one in told for what in (*one.wrong, *one.unreadable)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="runs that are killed (default 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="on the disk to use (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started, done = time.monotonic(), Counter[str]()

    def progress(told: Told) -> None:
        done["runs"] += 1
        done["equal"] += told.equal
        if done["runs"] % 10 == 0 or not told.equal:
            print(f"  {done['equal']} of {done['runs']} equal, {time.monotonic() - started:.0f} s", file=sys.stderr)

    with tempfile.TemporaryDirectory(dir=options.folder) as folder, Nursery() as nursery:
        found = summary(study(nursery, options.kills, options.seed, Path(folder), progress=progress))
    good = found["equal"] == found["runs"] and not found["unreadable"]
    if options.json:
        print(json.dumps({"torch": torch.__version__, "seed": options.seed, **found}, indent=2))
        return 0 if good else 1
    for kind, count in found["moments"].items():
        print(f"{kind:<16} {count:4d} kills")
    print(
        f"{found['kills']} kills in {found['runs']} runs, {found['half_written']} with a checkpoint half written, ",
        end="",
    )
    print(f"{found['from_the_start']} before there was any")
    print(
        f"{found['equal']} of {found['runs']} resumed runs end bit-identical; {found['unreadable']} unreadable folders"
    )
    for what in found["wrong"]:
        print(f"WRONG: {what}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
