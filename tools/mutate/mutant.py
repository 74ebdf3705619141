"""One deliberate breakage, and where it lies."""

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "steadystep"
Function = ast.FunctionDef | ast.AsyncFunctionDef
Symbol = Function | ast.ClassDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """Bytes `start` to `end` of a file replaced by `put`."""

    path: str  # below the package
    line: int
    start: int
    end: int
    old: str
    put: str
    kind: str

    @property
    def package(self) -> str:
        """The folder at the top, or a loose module's own name."""
        return Path(self.path).parts[0].removesuffix(".py")

    @property
    def key(self) -> str:
        """The same for the same change of the same text, wherever in the tree the tool runs."""
        parts = [self.path, str(self.start), str(self.end), self.put, (PACKAGE / self.path).read_text()]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        def flat(text: str) -> str:
            return " ".join(text.split())[:100]

        return f"{self.path}:{self.line}  {flat(self.old)}  =>  {flat(self.put) or '(nothing)'}"

    def apply(self, source: bytes) -> bytes:
        """The broken file."""
        return source[: self.start] + self.put.encode() + source[self.end :]


class Positions:
    """From the parser's lines and columns to bytes of the file."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Where a node begins and ends."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset

    def line_of(self, position: int) -> int:
        """The line, counted from 1, that holds a byte."""
        return self.source.count(b"\n", 0, position) + 1


def symbols(tree: ast.Module) -> Iterator[tuple[str, Symbol]]:
    """Every function and class with its qualified name, as `Class.method` or `function.<locals>.inner`."""

    def below(node: ast.AST, prefix: str) -> Iterator[tuple[str, Symbol]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Symbol):
                name = prefix + child.name
                yield name, child
                yield from below(child, name + ("." if isinstance(child, ast.ClassDef) else ".<locals>."))
            else:
                yield from below(child, prefix)

    return below(tree, "")


@cache
def tree_of(path: str) -> ast.Module:
    """A file of the package."""
    return ast.parse((PACKAGE / path).read_bytes())


@cache
def enclosing_function(path: str, line: int) -> str | None:
    """The name of the innermost function around a line."""
    found = None
    for name, node in symbols(tree_of(path)):
        if isinstance(node, Function) and node.lineno <= line <= (node.end_lineno or 0):
            found = name
    return found
