"""How often the birthplace of a NaN is named: `steadystep.incidents.locate` on faults planted in known places.

Attention, norm, embedding, residual, convolution, recurrence, loss and data; forward and backward; fp32, and fp16 under
autocast with a loss scale. A row is right when both the module and the phase are. Wanted: 19 of 20. Run:

    python benchmarks/origins.py           # the table
    python benchmarks/origins.py --json    # for a program
"""

import argparse
import json
import sys

import torch

from planted.cases import PLANTED
from steadystep.incidents import locate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for case in PLANTED:
        model, work = case.make()
        found = locate(model, work, scale=case.scale)
        right = (found.module, found.phase) == (case.module, case.phase)
        rows.append({"fault": case.what, "planted": case.module, "found": found.module, "right": right})
        if not options.json:
            said = f"{found.phase:<8} {found.place}: {found.what}"
            print(f"{'right' if right else 'WRONG':<6} {case.what:<42} {case.module or '-':<15} {said}", flush=True)
    num_right = sum(bool(row["right"]) for row in rows)
    if options.json:
        print(json.dumps({"torch": torch.__version__, "right": num_right, "of": len(rows), "rows": rows}, indent=2))
    else:
        print(f"{num_right} of {len(rows)}")
    return 0 if num_right * 20 >= len(rows) * 19 else 1


if __name__ == "__main__":
    sys.exit(main())
