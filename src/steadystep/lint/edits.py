"""A fix as a unified diff: lines put in, taken out or replaced, never applied here."""

import ast
import difflib
import re
from collections.abc import Sequence
from typing import final

from steadystep.lint.script import Script


@final
class Edit:
    """Changes to one script, in line numbers of the original."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._gone: set[int] = set()
        self._before: dict[int, list[str]] = {}
        self._instead: dict[int, str] = {}

    def remove(self, stmt: ast.stmt) -> "Edit":
        """Take a statement out."""
        self._gone.update(range(stmt.lineno, (stmt.end_lineno or stmt.lineno) + 1))
        return self

    def put_before(self, stmt: ast.stmt, *lines: str) -> "Edit":
        """New lines in front of a statement, indented like it."""
        return self._put(stmt.lineno, stmt, lines)

    def put_after(self, stmt: ast.stmt, *lines: str) -> "Edit":
        """New lines behind a statement, indented like it."""
        return self._put((stmt.end_lineno or stmt.lineno) + 1, stmt, lines)

    def replace(self, node: ast.AST, text: str) -> "Edit":
        """Another expression in its place; both on one line."""
        first, end = int(getattr(node, "lineno", 0)), int(getattr(node, "end_lineno", 0) or 0)
        if first == end and 0 < first <= len(self._script.lines):
            line = self._instead.get(first, self._script.lines[first - 1])
            raw = line.encode()
            begin, stop = int(getattr(node, "col_offset", 0)), int(getattr(node, "end_col_offset", 0) or 0)
            self._instead[first] = (raw[:begin] + text.encode() + raw[stop:]).decode(errors="replace")
        return self

    def _put(self, line: int, like: ast.stmt, lines: Sequence[str]) -> "Edit":
        original = self._script.lines[like.lineno - 1]
        indent = original[: len(original) - len(original.lstrip())]
        self._before.setdefault(line, []).extend(indent + text for text in lines)
        return self

    def diff(self) -> str:
        """What changes, with one line of context; empty when nothing does."""
        touched = [*self._before, *self._gone, *self._instead]
        if not touched:
            return ""
        # why not the whole file: difflib's time grows with what it is shown, and every hit has its diff
        first = max(1, min(touched) - 2)
        old, new = self._script.lines[first - 1 : max(touched) + 2], list[str]()
        for number, line in enumerate(old, first):
            new += self._before.get(number, [])
            if number not in self._gone:
                new.append(self._instead.get(number, line))
        new += self._before.get(len(self._script.lines) + 1, [])
        name = self._script.path
        lines = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}", lineterm="", n=1)
        return "\n".join(_moved(line, first - 1) if line.startswith("@@ ") else line for line in lines)


def _moved(header: str, by: int) -> str:
    """`@@ -1,3 +1,4 @@` of a part of the file, with the numbers of the file."""
    return re.sub(r"([-+])(\d+)", lambda found: f"{found[1]}{int(found[2]) + by}", header)


def source_of(stmt: ast.stmt, script: Script) -> list[str]:
    """The lines of a statement without their common indent."""
    lines = script.lines[stmt.lineno - 1 : stmt.end_lineno]
    indent = len(lines[0]) - len(lines[0].lstrip()) if lines else 0
    return [line[indent:] if not line[:indent].strip() else line.lstrip() for line in lines]


def can_move(stmt: ast.stmt, to: ast.stmt, script: Script) -> bool:
    """Whether a statement can change its place next to another one: same block of the same function."""
    if ";" in script.lines[stmt.lineno - 1] or ";" in script.lines[to.lineno - 1]:
        return False
    return script.parents.get(stmt) is script.parents.get(to) and isinstance(stmt, ast.Expr | ast.Assign)
