"""Compare with the frozen traces, or record them anew: `python -m tests.golden --record`."""

import argparse
import sys
import time
from difflib import unified_diff

import torch

from tests.golden import files
from tests.golden.choice import chosen
from tests.golden.trace import Trace, machine, trace_of


def main() -> int:
    """Returns 1 when a trace differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--record", action="store_true", help="replace the stored traces")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="such as 126-guard-loss")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.record:
        return _record(asked.only)
    paths = [path for path in files.stored() if not asked.only or path.stem in asked.only]
    return int(any([_differs(path) for path in paths]))  # noqa: C419 - all of them are shown


def _record(only: list[str]) -> int:
    runs = [run for run in chosen() if not only or files.name_of(run) in only]
    if not only:
        for path in files.stored():
            path.unlink()
    for run in runs:
        began = time.monotonic()
        files.write(run, trace_of(run))
        _say(f"{files.name_of(run)} {time.monotonic() - began:.1f} s")
    files.write_machine(machine())
    return 0


def _differs(path) -> bool:
    run, before = files.read(path)
    now = trace_of(run)
    same_machine = machine() == files.read_machine()
    lines = list(
        unified_diff(_shown(before, same_machine), _shown(now, same_machine), "frozen", "now", n=0, lineterm="")
    )
    _say(f"{path.stem} {'DIFFERS' if lines else 'same'}{'' if same_machine else ' (bits not compared)'}")
    for line in lines:
        _say(line)
    return bool(lines)


def _shown(trace: Trace, with_bits: bool) -> list[str]:
    return [*trace.decisions, *([trace.bits] if with_bits else [])]


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
