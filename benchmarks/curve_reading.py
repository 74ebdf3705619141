"""Does the doctor tell curves apart? `python benchmarks/curve_reading.py`: generated ones of five kinds.

Rules were developed on seeds 0 to 299; the judge's are 10,000 to 10,199 by default. Nothing of a guard is replayed,
except on the shorter healthy curves, where it must leave every one alone.
"""

import argparse
import time
from collections import Counter

from made_up_curves import CURVE_KINDS, made_up
from steadystep.runs.diagnosis import diagnose
from steadystep.runs.reading import Reading

# The first of these that a reading holds is what it calls the curve.
ORDER = {
    "overfitting": "overfitting",
    "oscillation": "oscillation",
    "generalisation-gap": "gap",
    "plateau": "plateau",
    "underfitting": "plateau",
}
_SHORT = 3000  # points


def called(reading: Reading) -> str:
    """The kind that a reading comes to; the name of anything else that it calls trouble."""
    kinds = [pattern.kind for pattern in reading.findings]
    for kind, name in ORDER.items():
        if kind in kinds:
            return name
    return reading.troubles[0].kind if reading.troubles else "healthy"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=10_000, help="the first seed")
    parser.add_argument("--count", type=int, default=200, help="curves of each kind")
    parser.add_argument("--longest", type=int, default=100_000, help="points")
    parser.add_argument("--show", action="store_true", help="name the curves that were taken for something else")
    options = parser.parse_args()
    began, actions = time.perf_counter(), 0
    print(f"{'kind':<14}{'right':>8}   taken for")
    for kind in CURVE_KINDS:
        told: Counter[str] = Counter()
        for seed in range(options.first, options.first + options.count):
            run = made_up(kind, seed, longest=options.longest)
            guarded = kind == "healthy" and len(run.loss) <= _SHORT
            reading = diagnose(run, guard=guarded)
            actions += len(reading.plans)
            name = called(reading)
            told[name] += 1
            if options.show and name != kind:
                print(
                    f"    {run.name}: {name} ({len(run.loss) or len(run.metrics['accuracy'])} points) {reading.verdict}"
                )
        others = ", ".join(f"{name} {count}" for name, count in told.most_common() if name != kind)
        print(f"{kind:<14}{told[kind] / options.count:>8.1%}   {others}", flush=True)
    print(f"{actions} actions on healthy curves; {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
