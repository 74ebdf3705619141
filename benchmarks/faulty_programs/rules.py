"""Which rules of the diagnosis fire on which set of programs: a rule that is right in one set only is a memory of it.

    python -m benchmarks.faulty_programs.rules --half unseen fresh

For each rule and set: on how many faulty programs it fires and names an accepted label, on how many it names another
one, and on how many working programs it fires at all. A rule that fires is not yet a diagnosis: its weight may be below
1, and another cause may come first.
"""

import argparse
import pickle
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

import torch

import steadystep
from steadystep.diagnosis.facts import Facts
from steadystep.diagnosis.rules import EVIDENCE_RULES, FAULT_RULES

from . import EVERY, half
from .judge import MEANS, drive
from .program import Program

HALVES = ("develop", "sealed", "unseen", "fresh", "later")


def fired(facts: Facts) -> Iterator[tuple[str, str, str]]:
    """Name, cause and fault of every rule that has evidence."""
    for rule in (*EVIDENCE_RULES, *FAULT_RULES):
        if rule.sign(facts):
            name = rule.sign.__qualname__.split(".")[0]
            yield f"{rule.fault or rule.cause}: {name}", str(rule.cause), str(rule.fault or "")


def tally(runs: Iterable[tuple[Program, bool, Facts]]) -> Counter[tuple[str, str, str]]:
    """How often each rule is right, wrong or false, by set."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for program, faulty, facts in runs:
        accepted = {name for label in program.faults for name in (label, *MEANS.get(label, ()))}
        for name, cause, fault in set(fired(facts)):
            kind = "false" if not faulty else "right" if {cause, fault} & accepted else "wrong"
            counts[name, half(program), kind] += 1
    return counts


def table(counts: Counter[tuple[str, str, str]], halves: Iterable[str]) -> Iterator[str]:
    """One line per rule: right, wrong / false, for each set."""
    yield "| rule | " + " | ".join(halves) + " |"
    yield "|---|" + "---|" * len(list(halves))
    for name in sorted({key[0] for key in counts}):
        cells = [" / ".join(str(counts[name, each, kind]) for kind in ("right", "wrong", "false")) for each in halves]
        yield f"| {name} | " + " | ".join(cells) + " |"


def _facts(name: str, faulty: bool) -> bytes | None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        guard = drive(next(p for p in EVERY if p.name == name).build(faulty, 0))
    except steadystep.SteadystepError:  # refused before the first step: no rule is asked
        return None
    return pickle.dumps(guard._parts.run_history.facts())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=HALVES, nargs="+", default=list(HALVES[:4]))
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    tasks = [(p, f) for p in EVERY if half(p) in options.half for f in ((True, False) if p.faults else (False,))]
    with ProcessPoolExecutor(options.jobs) as pool:
        coming = [(p, f, pool.submit(_facts, p.name, f)) for p, f in tasks]
        runs = [(p, f, pickle.loads(kept)) for p, f, future in coming if (kept := future.result()) is not None]
    for line in table(tally(runs), options.half):
        print(line)


if __name__ == "__main__":
    main()
