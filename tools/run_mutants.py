"""Breaks the code on purpose, one line at a time, and expects a test to go red for each.

The lists are `tools/mutants/*.toml`: a file, a line to find (exactly once), what to put in its place, and the tests
that must notice. Each mutant runs in a copy of `src`, so the working tree is never touched.

    python tools/run_mutants.py             # all
    python tools/run_mutants.py --only clip # those whose file or line contains the word
    python tools/run_mutants.py --list clip # those of one list, wherever below tools/mutants it lies
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = Path("src/steadystep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One deliberate breakage."""

    file: str
    find: str
    put: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        """For the report."""
        return f"{self.file}: {self.find.strip()}  =>  {self.put.strip() or '(nothing)'}"


def load(name: str | None) -> list[Mutant]:
    folder = ROOT / "tools" / "mutants"
    lists = sorted(folder.glob("*.toml") if name is None else folder.rglob(f"{name}.toml"))
    raw = [entry for path in lists for entry in tomllib.loads(path.read_text())["mutant"]]
    mutants = [Mutant(file=m["file"], find=m["find"], put=m["put"], tests=tuple(m["tests"])) for m in raw]
    for mutant in mutants:
        count = (ROOT / PACKAGE / mutant.file).read_text().count(mutant.find)
        if count != 1:
            sys.exit(f"the list is out of date: found {count} times in {mutant.file}: {mutant.find!r}")
    return mutants


def run_tests(source: Path, tests: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests]
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def survives(mutant: Mutant) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        path = source / "steadystep" / mutant.file
        path.write_text(path.read_text().replace(mutant.find, mutant.put))
        done = run_tests(source, mutant.tests)
    # 1: a test failed. 2: the tests no longer import, which a user would notice too. Both were green a moment ago.
    return done.returncode not in (1, 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a word in the file or the line")
    parser.add_argument("--list", help="the name of one list")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    mutants = [m for m in load(options.list) if options.only in m.file or options.only in m.find]
    tests = tuple(sorted({test for mutant in mutants for test in mutant.tests}))
    healthy = run_tests(ROOT / "src", tests)
    if healthy.returncode != 0:
        print(healthy.stdout)
        sys.exit("the tests are red without any mutant")
    with ThreadPoolExecutor(options.jobs) as pool:
        verdicts = pool.map(survives, mutants)
        survivors = 0
        for mutant, survived in zip(mutants, verdicts, strict=True):
            survivors += survived
            print(f"{'SURVIVED' if survived else 'caught  '}  {mutant.name}", flush=True)
    print(f"{len(mutants) - survivors} of {len(mutants)} mutants caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
