"""Which tests reach which line: recorded once per test file, kept under `build/mutants/reach`.

A record is used until its test file changes. Where a source file has changed or moved since, tests are found by the
name of the function instead of the line, so that a change of a few lines does not cost a new recording.
"""

import ast
import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from .mutant import PACKAGE, ROOT, Function, Mutant, Positions, enclosing_function, symbols, tree_of
from .sandbox import UNCHANGED, Child, overlay, run_pytest

FOLDER = ROOT / "build" / "mutants" / "reach"
_LIMIT_S = 900.0


@dataclass(slots=True)
class Reached:
    """What one test runs through."""

    seconds: float
    size: int  # lines in all; a test of little is a test of something particular


class _Lines:
    """Which lines of one function were run; it stops looking when there are no others."""

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.all = frozenset(line for _, _, line in code.co_lines() if line is not None)
        self.missing = set(self.all)

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        self.missing.discard(frame.f_lineno)
        return self.trace if self.missing else None


class Recorder:
    """A pytest plugin that notes the lines of the package that each passing test runs through."""

    def __init__(self, folder: Path) -> None:
        self._folder = f"{folder / PACKAGE.name}/"
        # why by id: a code object hashes its whole content. The codes are held, so that no id comes twice.
        self._foreign: dict[int, CodeType] = {}
        self._seen: dict[int, _Lines] = {}
        self._passed = True
        self.tests: dict[str, Any] = {}

    def _enter(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if id(code) in self._foreign:
            return None
        lines = self._seen.get(id(code))
        if lines is None:
            if not code.co_filename.startswith(self._folder):
                self._foreign[id(code)] = code
                return None
            lines = self._seen[id(code)] = _Lines(code)
        return lines.trace(frame, event, None)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Around each test."""
        self._seen, self._passed = {}, True
        began = time.monotonic()
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            if self._passed:
                self.tests[item.nodeid] = self._described(time.monotonic() - began)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that is red or skipped proves nothing."""
        self._passed = self._passed and report.passed

    def _described(self, seconds: float) -> dict[str, Any]:
        lines: dict[str, set[int]] = {}
        functions: dict[str, set[str]] = {}
        for seen in self._seen.values():
            path = seen.code.co_filename.removeprefix(self._folder)
            lines.setdefault(path, set()).update(seen.all - seen.missing)
            functions.setdefault(path, set()).add(seen.code.co_qualname)
        return {
            "seconds": round(seconds, 3),
            "lines": {path: sorted(found) for path, found in lines.items()},
            "functions": {path: sorted(found) for path, found in functions.items()},
        }


def record(test_files: Iterable[str], *, at_once: int) -> None:
    """Write down what the tests of each file reach, several files at a time, unless it is known."""
    waiting = [file for file in test_files if not _is_known(file)]
    running: list[_Recording] = []
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(_Recording(waiting.pop(0)))
        running = [one for one in running if not one.ended()]
        time.sleep(0.01)


def _is_known(test_file: str) -> bool:
    target = _target(test_file)
    return target.is_file() and json.loads(target.read_text())["mark"] == _mark(ROOT / test_file)


class _Recording:
    """One test file that is being run under the tracer, in a child."""

    def __init__(self, test_file: str) -> None:
        print(f"recording {test_file}", flush=True)
        self._test_file = test_file
        self._stack = ExitStack()
        self._folder = self._stack.enter_context(overlay(UNCHANGED, (PACKAGE / UNCHANGED).read_bytes()))
        self._child = Child(self._folder, self._task, limit_s=_LIMIT_S)

    def _task(self) -> int:
        recorder = Recorder(self._folder)
        run_pytest([self._test_file, "--maxfail=1000"], [recorder])
        paths = {path for test in recorder.tests.values() for path in test["lines"]}
        sources = {path: _mark(PACKAGE / path) for path in sorted(paths)}
        written = {"mark": _mark(ROOT / self._test_file), "sources": sources, "tests": recorder.tests}
        target = _target(self._test_file)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(written, separators=(",", ":")))
        return 0

    def ended(self) -> bool:
        """Tell whether it is over; a file that cannot be recorded ends the program."""
        code = self._child.poll()
        if code is None:
            return False
        if code != 0:
            sys.exit(f"not recorded: {self._test_file}\n{(self._folder / 'said').read_text()[-2000:]}")
        self._stack.close()
        return True


def _target(test_file: str) -> Path:
    return FOLDER / (test_file.replace("/", "__") + ".json")


def _mark(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


_NO_LONGER = ""  # stands for the path of a function whose file has changed, or gone, since it was recorded


@dataclass(slots=True)
class Reach:
    """The records of several test files, asked for one mutant at a time."""

    tests: dict[str, Reached] = field(default_factory=dict)
    _at_line: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    _at_function: dict[tuple[str, str], set[str]] = field(default_factory=dict)

    def load(self, test_files: Iterable[str]) -> None:
        """Takes what was recorded."""
        for test_file in test_files:
            read = json.loads(_target(test_file).read_text())
            now = {path: (PACKAGE / path).is_file() and _mark(PACKAGE / path) for path in read["sources"]}
            old = {path for path, mark in read["sources"].items() if mark != now[path]}
            for name, test in read["tests"].items():
                self._add(name, test, old)

    def _add(self, name: str, test: dict[str, Any], old: set[str]) -> None:
        self.tests[name] = Reached(seconds=test["seconds"], size=sum(map(len, test["lines"].values())))
        for path, found in test["lines"].items():
            for line in () if path in old else found:
                self._at_line.setdefault((path, line), set()).add(name)
        for path, names in test["functions"].items():
            for function in names:
                self._at_function.setdefault((_NO_LONGER if path in old else path, function), set()).add(name)

    def of(self, mutant: Mutant) -> list[str]:
        """The tests that may notice, the likeliest first."""
        statement = _statement(mutant.path, mutant.line)
        found = self._through(mutant.path, _lines(statement))
        if isinstance(statement, Function):  # a default value
            name = enclosing_function(mutant.path, mutant.line) or ""
            found |= self._at_function.get((mutant.path, name), set())
        if enclosing_function(mutant.path, mutant.line) is None:
            # A constant or a field: the lines with its name, or with the name of its class.
            for name in _owners(mutant.path, mutant.line):
                for path, line in _mentions(name):
                    found |= self._through(path, [line])
        mirror = f"tests/unit/{mutant.package}/"

        def order(name: str) -> tuple[bool, float, int, str]:
            """Tests of the same room first, they know most about it; of these the quick ones."""
            return not name.startswith(mirror), round(self.tests[name].seconds, 1), self.tests[name].size, name

        return sorted(found, key=order)

    def _through(self, path: str, lines: Iterable[int]) -> set[str]:
        """Tests that run through one of these lines, as far as is known."""
        found: set[str] = set()
        for line in lines:
            found |= self._at_line.get((path, line), set())
            if (function := enclosing_function(path, line)) is not None:
                found |= self._at_function.get((_NO_LONGER, function), set())
        return found


def _statement(path: str, line: int) -> ast.stmt:
    """The innermost one around a line."""
    around = [n for n in ast.walk(tree_of(path)) if isinstance(n, ast.stmt) and n.lineno <= line <= (n.end_lineno or 0)]
    return max(around, key=lambda node: (node.lineno, -(node.end_lineno or 0)))


def _lines(statement: ast.stmt) -> range:
    body = getattr(statement, "body", None)
    end = max(body[0].lineno - 1, statement.lineno) if body else statement.end_lineno or statement.lineno
    return range(statement.lineno, end + 1)


def _owners(path: str, line: int) -> list[str]:
    classes = [
        node.name
        for _, node in symbols(tree_of(path))
        if isinstance(node, ast.ClassDef) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    if classes:
        return classes[-1:]
    statement = _statement(path, line)
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [node.id for target in targets if target for node in ast.walk(target) if isinstance(node, ast.Name)]


@cache
def _mentions(name: str) -> list[tuple[str, int]]:
    found = []
    for file in PACKAGE.rglob("*.py"):
        source = file.read_bytes()
        positions = Positions(source)
        for match in re.finditer(rb"\b%b\b" % name.encode(), source):
            found.append((str(file.relative_to(PACKAGE)), positions.line_of(match.start())))
    return found
