"""Runs the tests for the inner loop: those of the rooms that changed, and the marked core.

    python tools/changed_tests.py                   # what changed since main, committed or not
    python tools/changed_tests.py --since HEAD~1 -- -x -k rollback
    python tools/changed_tests.py --list            # only say which

A file in src/steadystep/<room>/ stands for tests/unit/<room>, a loose module for tests/unit/test_<module>.py, a test
file for itself. Files with `pytestmark = pytest.mark.core` always run. When more than `MOST_ROOMS` rooms changed, only
the test files named after changed modules are added: `make test` is the better answer then.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
MOST_ROOMS = 4
CORE_MARK = "pytestmark = pytest.mark.core"


def base(root: Path) -> str:
    """The commit where this branch left main, or the last commit where there is no main."""
    for main in ("main", "origin/main"):
        found = _git(root, "merge-base", "HEAD", main, may_fail=True)
        if found:
            return found[0]
    return "HEAD"


def changed_files(root: Path, since: str) -> list[str]:
    """Files that differ from `since`: committed, staged, unstaged or untracked."""
    known = _git(root, "diff", "--name-only", since)
    new = _git(root, "ls-files", "--others", "--exclude-standard")
    return sorted({*known, *new})


def core_files(root: Path) -> list[str]:
    """Test files that are marked as core as a whole."""
    files = (root / "tests").rglob("test_*.py")
    return sorted(path.relative_to(root).as_posix() for path in files if CORE_MARK in path.read_text(encoding="utf-8"))


def unit_tests_of(changed: Iterable[str], root: Path) -> list[str]:
    """Test files and folders that stand for the changed files, as far as they exist."""
    homes = {path: home for path in map(PurePosixPath, changed) if (home := _home(path)) is not None}
    if len({home for path, home in homes.items() if path.parts[0] != "tests"}) > MOST_ROOMS:
        homes = {path: _narrow(path, home) for path, home in homes.items()}
    found = {home.as_posix() for home in homes.values() if (root / home).exists()}
    return sorted(path for path in found if not any(str(up) in found for up in PurePosixPath(path).parents))


def _home(path: PurePosixPath) -> PurePosixPath | None:
    match path.parts:
        case ("src", "steadystep", module) if module.endswith(".py"):
            return PurePosixPath("tests/unit", f"test_{module}")
        case ("src", "steadystep", room, *_):
            return PurePosixPath("tests/unit", room)
        case ("tools", *_):
            return PurePosixPath("tests/unit/tools")
        case ("tests", *_) if path.name.startswith("test_") and path.suffix == ".py":
            return path
    return None


def _narrow(path: PurePosixPath, home: PurePosixPath) -> PurePosixPath:
    return home if home.suffix else home / f"test_{path.stem}.py"


def _git(root: Path, *arguments: str, may_fail: bool = False) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    if done.returncode and not may_fail:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.splitlines() if done.returncode == 0 else []


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--since", help="compare with this revision instead of main")
    parser.add_argument("--list", action="store_true", help="print the choice and run nothing")
    parser.add_argument("pytest", nargs="*", help="further arguments for pytest, after --")
    asked = parser.parse_args(arguments)
    since = asked.since or base(ROOT)
    chosen, core = unit_tests_of(changed_files(ROOT, since), ROOT), core_files(ROOT)
    print(f"changed since {since[:12]}: {' '.join(chosen) or 'nothing that has unit tests'}")
    print(f"core: {' '.join(core)}", flush=True)
    if asked.list:
        return 0
    paths = list(dict.fromkeys([*chosen, *core]))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-m", "not slow", *asked.pytest, *paths]
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
