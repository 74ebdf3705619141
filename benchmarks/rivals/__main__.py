"""Run the real packages through the harness of `steadystep bench recovery` and `overhead`.

    make bench-rivals                                        # both, from the environment .venv-rivals
    PYTHONPATH=benchmarks python -m rivals recovery --quick  # one task, three faults, one seed

Rows go to benchmarks/results/rivals.jsonl and rivals-overhead.jsonl, are kept as soon as they are there, and are shown
by `steadystep bench recovery` and `steadystep bench overhead`.
"""

import argparse
import sys
from pathlib import Path

from rivals.studies import RESULTS, STUDIES
from steadystep.cli.bench import show
from steadystep.errors import SteadystepError
from steadystep.lab.bench.study import Choice, parse_seeds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--seeds", default="")
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    choice = Choice(quick=args.quick, seeds=parse_seeds(args.seeds) if args.seeds else None)
    try:
        return show(
            STUDIES[args.study],
            choice,
            out=args.out,
            num_workers=args.jobs or None,
            fresh=args.fresh,
            only_stored=False,
            as_json=False,
            figure=None,
        )
    except SteadystepError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
