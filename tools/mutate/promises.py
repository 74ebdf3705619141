"""The mutants kept by hand: each stands for one promise.

They are named by function and text, and their tests by name, so that a file may move without a word here.
"""

import ast
import tomllib
from dataclasses import dataclass
from functools import cache
from typing import Any

from .mutant import PACKAGE, ROOT, Mutant, Positions, symbols

LIST = ROOT / "tools" / "promise_mutants.toml"
TESTS = ROOT / "tests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """A breakage and the tests that must notice."""

    mutant: Mutant
    tests: tuple[str, ...]


class StaleError(ValueError):
    """An entry speaks of something that is not there."""


def entries() -> list[dict[str, Any]]:
    """As written."""
    found: list[dict[str, Any]] = tomllib.loads(LIST.read_text())["mutant"]
    return found


def load_promises() -> list[Promise]:
    """All of them, found in the code of today."""
    return [located(entry) for entry in entries()]


def located(entry: dict[str, Any]) -> Promise:
    """Where an entry's text stands, and the tests it names."""
    found = [place for place in _places(entry["symbol"]) if _count(place, entry["find"])]
    if len(found) != 1 or _count(found[0], entry["find"]) != 1:
        times = sum(_count(place, entry["find"]) for place in found)
        raise StaleError(f"found {times} times in {entry['symbol']}: {entry['find']!r}")
    if entry["put"] == entry["find"]:
        raise StaleError(f"nothing is changed in {entry['symbol']}: {entry['find']!r}")
    if not entry["tests"]:
        raise StaleError(f"no tests for {entry['symbol']}: {entry['find']!r}")
    tests = tuple(test for name in entry["tests"] for test in _tests(name))
    return Promise(mutant=_mutant(found[0], entry), tests=tests)


@dataclass(frozen=True, slots=True)
class _Place:
    path: str
    start: int
    end: int


@cache
def _index() -> dict[str, list[_Place]]:
    found: dict[str, list[_Place]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        source = file.read_bytes()
        positions = Positions(source)
        path = str(file.relative_to(PACKAGE))
        for name, node in symbols(ast.parse(source)):
            found.setdefault(name, []).append(_Place(path, *positions.span(node)))
    return found


def _places(symbol: str) -> list[_Place]:
    places = _index().get(symbol)
    if places is None:
        raise StaleError(f"there is no {symbol}")
    return places


def _count(place: _Place, text: str) -> int:
    return (PACKAGE / place.path).read_bytes()[place.start : place.end].count(text.encode())


def _mutant(place: _Place, entry: dict[str, Any]) -> Mutant:
    source = (PACKAGE / place.path).read_bytes()
    start = source.index(entry["find"].encode(), place.start)
    end = start + len(entry["find"].encode())
    line = Positions(source).line_of(start)
    return Mutant(path=place.path, line=line, start=start, end=end, old=entry["find"], put=entry["put"], kind="promise")


@cache
def _test_index() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        for name, node in symbols(ast.parse(file.read_bytes())):
            if node.name.startswith("test_"):
                place = f"{file.relative_to(ROOT)}::{name.replace('.', '::')}"
                found.setdefault(node.name, []).append(place)
    return found


def _tests(name: str) -> list[str]:
    found = _test_index().get(name, [])
    if not found:
        raise StaleError(f"there is no test {name}")
    return found
