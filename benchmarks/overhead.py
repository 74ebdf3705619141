"""What a guard costs, in one process: `steadystep bench overhead` for a quick look, nothing stored.

python benchmarks/overhead.py                # all models
python benchmarks/overhead.py --blocks 24    # fewer alternations
python benchmarks/overhead.py --json         # for a program
"""

import argparse
import json
import sys

import torch

from steadystep.lab.bench.overhead import STUDY
from steadystep.lab.bench.overhead_steps import MODELS
from steadystep.lab.bench.study import StudyJob


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--blocks", type=int, default=60, help="alternations per model (default 60)")
    options = parser.parse_args()
    results = {}
    for name in MODELS:
        job = StudyJob(key=name, args={"who": "steadystep", "model": name, "blocks": options.blocks})
        results[name] = r = STUDY.run(job)
        if not options.json:
            print(
                f"{name:<20} guarded/plain {r['ratio']:.3f} (quartiles {r['low']:.3f} to {r['high']:.3f}), "
                f"plain/plain {r['noise']:.3f}, plain step {r['plain_us']:,.0f} us",
                flush=True,
            )
    if options.json:
        print(json.dumps({"torch": torch.__version__, "threads": 1, "results": results}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
