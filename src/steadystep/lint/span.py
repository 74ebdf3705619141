"""Where two versions of a script differ: one block, the statements around, and those that a moved one passes."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

_BLOCKS = ("body", "orelse", "finalbody")
_JUMPS = (ast.Break, ast.Continue, ast.Return, ast.Raise, ast.Yield, ast.YieldFrom, ast.Await)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Statements of one block that an edit replaces, between those that stay."""

    before: tuple[ast.stmt, ...]
    old: tuple[ast.stmt, ...]
    new: tuple[ast.stmt, ...]
    after: tuple[ast.stmt, ...]

    @property
    def added(self) -> ast.stmt | None:
        """The statement that is new, if that is all."""
        return self.new[0] if not self.old and len(self.new) == 1 else None


def span_of(old: Sequence[ast.stmt], new: Sequence[ast.stmt]) -> Span:
    """Return the innermost block in which two versions differ.

    An edit in several blocks gives the span around all of them: statements that are neither added nor moved.
    """
    was, now = [ast.dump(s) for s in old], [ast.dump(s) for s in new]
    shortest = min(len(was), len(now))
    first = next((i for i in range(shortest) if was[i] != now[i]), shortest)
    last = next((i for i in range(shortest - first) if was[-1 - i] != now[-1 - i]), shortest - first)
    inner_old, inner_new = old[first : len(old) - last], new[first : len(new) - last]
    if len(inner_old) == len(inner_new) == 1:
        inside = _inside(inner_old[0], inner_new[0])
        if inside is not None:
            return inside
    return Span(
        before=tuple(old[:first]), old=tuple(inner_old), new=tuple(inner_new), after=tuple(old[len(old) - last :])
    )


def _inside(old: ast.AST, new: ast.AST) -> Span | None:
    """The span in a block of two compound statements that differ in nothing else."""
    if type(old) is not type(new):
        return None
    differing: list[Span] = []
    for name, was in ast.iter_fields(old):
        now = getattr(new, name, None)
        if name in _BLOCKS and isinstance(was, list) and isinstance(now, list):
            if list(map(ast.dump, was)) != list(map(ast.dump, now)):
                differing.append(span_of(was, now))
        elif name in ("handlers", "cases") and isinstance(now, list) and len(was) == len(now):
            pairs = [(a, b) for a, b in zip(was, now, strict=True) if ast.dump(a) != ast.dump(b)]
            found = [_inside(a, b) for a, b in pairs]
            if None in found:
                return None
            differing += [span for span in found if span is not None]
        elif _dumped(was) != _dumped(now):
            return None
    return differing[0] if len(differing) == 1 else None


def _dumped(value: object) -> str:
    items = value if isinstance(value, list) else [value]
    return "|".join(ast.dump(v) if isinstance(v, ast.AST) else repr(v) for v in items)


def moved(span: Span) -> tuple[ast.stmt, tuple[ast.stmt, ...]] | None:
    """Return the one statement that changed its place and those it passes; None for any other edit."""
    was, now = [ast.dump(s) for s in span.old], [ast.dump(s) for s in span.new]
    if len(was) < 2 or len(was) != len(now):
        return None
    if now == was[1:] + was[:1]:
        return span.old[0], span.old[1:]
    if now == was[-1:] + was[:-1]:
        return span.old[-1], span.old[:-1]
    return None


def may_pass(one: ast.stmt, others: Sequence[ast.stmt], *, but: ast.stmt | None = None) -> bool:
    """Whether a statement means the same on the other side of these: no shared names are set, nothing jumps out.

    Args:
        one: the statement.
        others: what it passes.
        but: one of them may set what `one` reads: it is moved in order to see that.
    """
    if not isinstance(one, ast.Expr | ast.Assign):
        return False
    reads, sets = _paths(one)
    for other in others:
        also_reads, also_sets = _paths(other)
        if sets & (also_reads | also_sets) or (other is not but and reads & also_sets):
            return False
        if any(isinstance(node, _JUMPS) for node in ast.walk(other)):
            return False
    return True


def _paths(stmt: ast.stmt) -> tuple[set[str], set[str]]:
    """The dotted names that a statement reads and sets; `a.b` is read with `a`."""
    reads: set[str] = set()
    sets: set[str] = set()
    for node in ast.walk(stmt):
        if isinstance(node, ast.Name | ast.Attribute):
            path = ast.unparse(node)
            (reads if isinstance(node.ctx, ast.Load) else sets).add(path)
        elif isinstance(node, ast.AugAssign):
            reads.add(ast.unparse(node.target))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            sets.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            sets.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    return reads, sets


def calls(stmt: ast.stmt) -> Iterator[ast.Call]:
    """Yield the calls in a simple statement; none of a loop, a branch or a definition."""
    if not isinstance(stmt, ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign):
        return
    for node in ast.walk(stmt):
        if isinstance(node, ast.Call):
            yield node


def calls_method(stmt: ast.stmt, owner: str, method: str, argument: str | None = None) -> bool:
    """Whether a simple statement calls `owner.method(...)`, with this first argument if one is given."""
    for call in calls(stmt):
        first = ast.unparse(call.args[0]) if call.args else None
        if ast.unparse(call.func) == f"{owner}.{method}" and argument in (None, first):
            return True
    return False
