"""Breaks the code on purpose, one small change at a time, and expects a test to go red for each.

    python -m tools.mutate                          # a sample of every core package
    python -m tools.mutate detectors policy --sample 30
    python -m tools.mutate signals --all
    python -m tools.mutate --since main             # every change on the lines touched since a revision
    python -m tools.mutate --promises               # those of tools/promise_mutants.toml

Verdicts are kept in build/mutants/verdicts.jsonl: a run that was stopped goes on where it was, and --retry asks the
survivors again after tests were added, and those that ran out of time (with a longer --limit).
"""

import argparse
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from .in_place import judge_in_place
from .mutant import PACKAGE, ROOT, Mutant
from .operators import mutants_of
from .promises import load_promises
from .reach import Reach, record
from .sandbox import warm_up
from .verdicts import Job, Verdict, judge, keep, known, table, voided

# What a run depends on. A name that is not there is passed over.
CORE: tuple[str, ...] = (
    "engine",
    "signals",
    "detectors",
    "diagnosis",
    "policy",
    "actions",
    "snapshots",
    "checkpoints",
    "parallel",
)
TESTS = ("tests/unit", "tests/promises")
_PROMISE_LIMIT_S = 150.0


def files_of(names: Sequence[str]) -> list[Path]:
    """Source files of packages, loose modules or paths."""
    found: set[Path] = set()
    for name in names:
        for place in (PACKAGE / name, Path(name).resolve()):
            found |= set(place.rglob("*.py")) if place.is_dir() else set()
            found |= {file for file in (place, place.with_suffix(".py")) if file.is_file()}
    found = {file for file in found if file.is_relative_to(PACKAGE)}
    return sorted(found)


def touched_since(revision: str) -> dict[str, set[int]]:
    """Lines of the package that are new or changed, by file."""
    command = ["git", "diff", "-U0", "--no-color", "--relative", revision, "--", "src"]
    found: dict[str, set[int]] = {}
    path = ""
    for line in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if line.startswith("+++ "):
            path = line.removeprefix("+++ b/src/steadystep/")
        elif match := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))? @@", line):
            first = int(match[1])
            found.setdefault(path, set()).update(range(first, first + int(match[2] or 1)))
    return found


def chosen(options: argparse.Namespace) -> list[Mutant]:
    """The mutants that were asked for, in a fixed order."""
    touched = touched_since(options.since) if options.since else None
    found: dict[str, list[Mutant]] = {}
    for file in files_of(options.where or (["."] if touched is not None else CORE)):
        path = str(file.relative_to(PACKAGE))
        for mutant in mutants_of(path, file.read_bytes()):
            if touched is None or mutant.line in touched.get(path, ()):
                found.setdefault(mutant.package, []).append(mutant)
    if options.all or touched is not None:
        return [mutant for mutants in found.values() for mutant in mutants]
    return [mutant for package, mutants in found.items() for mutant in _sample(package, mutants, options)]


def _sample(package: str, mutants: list[Mutant], options: argparse.Namespace) -> list[Mutant]:
    drawn = random.Random(f"{options.seed}:{package}").sample(mutants, min(options.sample, len(mutants)))
    return sorted(drawn, key=lambda mutant: (mutant.path, mutant.start))


def jobs_for(mutants: Iterable[Mutant], options: argparse.Namespace) -> Iterator[Job]:
    """Each mutant with the tests that reach it, as many as the time for one allows."""
    files = test_files(options.tests)
    record(files, at_once=options.jobs)
    reach = Reach()
    reach.load(files)
    for mutant in mutants:
        spent = 0.0
        tests: list[str] = []
        for test in reach.of(mutant):
            spent += reach.tests[test].seconds
            if spent > options.budget and tests:
                break
            tests.append(test)
        yield mutant, tests


def test_files(places: Sequence[str]) -> list[str]:
    """Every test file at or below the given places."""
    found: set[Path] = set()
    for place in places:
        found |= {ROOT / place} if place.endswith(".py") else set((ROOT / place).rglob("test_*.py"))
    return sorted(str(path.relative_to(ROOT)) for path in found)


def judged(mutants: list[Mutant], options: argparse.Namespace) -> Iterator[tuple[Mutant, Verdict]]:
    """Each mutant's verdict. What survives in a fork is asked in the sandbox: a table may hold what was exchanged."""
    limit_s = options.limit or 20 + 3 * options.budget
    jobs = list(jobs_for(mutants, options)) if mutants else []
    if options.in_place and jobs:
        found = judge_in_place(jobs, limit_s=limit_s / 4)  # there is nothing to import
        settled = {mutant: verdict for mutant, verdict in found.items() if verdict.how in ("killed", "unreached")}
        yield from settled.items()
        jobs = [job for job in jobs if job[0] not in settled]
    yield from judge(jobs, at_once=options.jobs, limit_s=limit_s)


def survey(mutants: list[Mutant], options: argparse.Namespace) -> dict[Mutant, Verdict]:
    """A verdict for each, from the file or by running the tests."""
    before = known()
    verdicts = {mutant: before[mutant.key] for mutant in mutants if mutant.key in before}
    if options.retry:
        verdicts = {mutant: verdict for mutant, verdict in verdicts.items() if verdict.caught}
    todo = [mutant for mutant in mutants if mutant not in verdicts]
    print(f"{len(mutants)} mutants, {len(mutants) - len(todo)} known from earlier runs", flush=True)
    fresh: dict[Mutant, Verdict] = {}
    for mutant, verdict in judged(todo, options):
        fresh[mutant] = verdict
        keep(mutant, verdict)
        if not verdict.caught:
            print(f"{verdict.how.upper():9}  {mutant}", flush=True)
    for mutant, verdict in voided(fresh).items():
        fresh[mutant] = verdict
        keep(mutant, verdict)
        print(f"VOID       {mutant}: {verdict.killer} is red without it", flush=True)
    return verdicts | fresh


def run_promises(options: argparse.Namespace) -> int:
    """The ones kept by hand: all must be noticed."""
    jobs = ((promise.mutant, list(promise.tests)) for promise in load_promises())
    verdicts = dict(judge(jobs, at_once=options.jobs, limit_s=_PROMISE_LIMIT_S))
    verdicts |= voided(verdicts)
    for mutant, verdict in verdicts.items():
        print(f"{verdict.how:9}  {mutant}")
    caught = sum(verdict.caught for verdict in verdicts.values())
    print(f"{caught} of {len(verdicts)} mutants caught")
    return 0 if caught == len(verdicts) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", nargs="*", help="packages, loose modules or paths; without any, the core")
    parser.add_argument("--sample", type=int, default=60, help="how many mutants per package")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="every mutant instead of a sample")
    parser.add_argument("--since", metavar="REVISION", help="only lines touched since then")
    parser.add_argument("--promises", action="store_true", help="only those kept by hand")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="folders or files of tests to choose from")
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of tests per mutant, as recorded")
    parser.add_argument("--limit", type=float, help="seconds until a mutant counts as not decided; 20 and 3 budgets")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--in-place", action="store_true", help="judge in forks of one process with all tests: quicker")
    parser.add_argument("--retry", action="store_true", help="ask again whatever was not caught in earlier runs")
    options = parser.parse_args()
    warm_up()
    if options.promises:
        return run_promises(options)
    print(table(survey(chosen(options), options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
