"""The size of the source tree, and the bars it is held to; `tests/unit/tools/test_house.py` fails above one.

    python tools/house.py           files, lines and medians by room, the longest files and functions
    python tools/house.py --names   names of classes and public functions that stand for two things

`lint/` could be shipped alone and is counted by itself. A function is counted without its docstring.
"""

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "src" / "steadystep"
MOST_LINES = 300  # of a file
MOST_IN_FUNCTION = 40
MEDIAN = (120, 250)
BEGAN_AT = (59_000, 260)
"""Lines and files without the linter, from which on a file more needs lines of its own: docs/adr/0011."""
_LINES_A_FILE = 220

# Where a name is expected to come back: what the bench calls in each of its studies, a verb of the command line and the
# function that it runs, `watch` of each framework, and readers that are written `read.count`.
_BY_CONTRACT = ("lab/bench", "cli", "integrations", "faults/options.py")


class Function(NamedTuple):
    """A function or method and its length."""

    lines: int
    file: str
    name: str


def files(*, lint: bool = False) -> list[Path]:
    """The modules of the package; with `lint` those of the linter too."""
    return [path for path in sorted(PACKAGE.rglob("*.py")) if lint or room_of(path) != "lint"]


def most_files(lines: int) -> int:
    """How many files so many lines may stand in."""
    return BEGAN_AT[1] + max(0, lines - BEGAN_AT[0]) // _LINES_A_FILE


def room_of(path: Path) -> str:
    """The folder below the package, or the file where it is in none."""
    return path.relative_to(PACKAGE).parts[0]


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def functions(path: Path) -> Iterator[Function]:
    """All functions of a file, nested ones too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            told = first.end_lineno - first.lineno + 1 if ast.get_docstring(node) and first.end_lineno else 0
            yield Function((node.end_lineno or node.lineno) - node.lineno + 1 - told, _name(path), node.name)


def names_twice() -> dict[str, list[str]]:
    """Classes and public functions at the top of two files or more, without those of a contract."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in files():
        for node in ast.parse(path.read_text()).body:
            public = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
            if (isinstance(node, ast.ClassDef) or public) and not _name(path).startswith(_BY_CONTRACT):
                found[node.name].append(_name(path))  # type: ignore[attr-defined]
    return {name: places for name, places in sorted(found.items()) if len(places) > 1}


def _name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true")
    if parser.parse_args().names:
        for name, places in names_twice().items():
            print(f"{name:24} {', '.join(places)}")
        return 0
    rooms: dict[str, list[int]] = defaultdict(list)
    for path in files(lint=True):
        rooms[room_of(path)].append(lines_of(path))
    for room, lines in sorted(rooms.items()):
        print(f"{room:20} {len(lines):4} files {sum(lines):6} lines  median {median(lines):5.0f}")
    told = [lines_of(path) for path in files()]
    print(
        f"{'without lint':20} {len(told):4} files {sum(told):6} lines  median {median(told):5.0f}  longest {max(told)}"
    )
    longest = sorted((each for path in files(lint=True) for each in functions(path)), reverse=True)[:5]
    print("longest functions:", ", ".join(f"{each.file} {each.name} {each.lines}" for each in longest))
    return 0


if __name__ == "__main__":
    sys.exit(main())
