"""What a loop goes over, one by one, as far as it is written out: lists, tables, `zip`, `enumerate`, `.items()`."""

import ast
from collections.abc import Callable, Iterator

from steadystep.lint.names import name_of, path_of
from steadystep.lint.script import Bound, Script

Look = Callable[[ast.expr], list[Bound]]
"""How names are followed."""

_TABLES = ("ModuleDict", "ModuleList", "dict", "list", "tuple", "OrderedDict", "reversed", "sorted", "iter", "tqdm")
_COMPREHENSIONS = ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp


def loop_values(script: Script, name: str, node: ast.AST, look: Look) -> list[Bound] | None:
    """What the loop variable may be, of the innermost loop or comprehension around that has it; None without one."""
    for around in script.ancestors(node):
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(around, ast.For | ast.AsyncFor):
            pairs = [(around.target, around.iter)]
        elif isinstance(around, _COMPREHENSIONS):
            pairs = [(g.target, g.iter) for g in around.generators]
        for target, over in pairs:
            place = _place(target, name)
            if place is not None and not _is_in(script, node, over):
                return list(_each(over, place, look, 0))
    return None


def elements(table: ast.expr, look: Look, depth: int = 0) -> Iterator[Bound]:
    """The entries of a list or a table."""
    if depth > 3:
        return
    match table:
        case ast.List(elts=entries) | ast.Tuple(elts=entries) | ast.Set(elts=entries):
            for i, entry in enumerate(entries):
                if isinstance(entry, ast.Starred):
                    yield from elements(entry.value, look, depth + 1)
                else:
                    yield entry, None if not isinstance(entry, ast.Constant) else i
        case ast.Dict(values=entries):
            yield from ((entry, None) for entry in entries)
        case ast.DictComp(value=entry) | ast.ListComp(elt=entry) | ast.GeneratorExp(elt=entry):
            yield entry, None
        case ast.Call(func=ast.Attribute(attr="values" | "to" | "cuda" | "copy", value=inner)):
            yield from elements(inner, look, depth + 1)
        case ast.Call() if name_of(table.func).rpartition(".")[2] in _TABLES:
            yield from ((k.value, None) for k in table.keywords if k.arg and name_of(table.func) == "dict")
            for given in table.args[:1]:
                yield from elements(given, look, depth + 1)
        case ast.BinOp(op=ast.Add()):
            yield from elements(table.left, look, depth + 1)
            yield from elements(table.right, look, depth + 1)
        case ast.Name() | ast.Attribute() | ast.Subscript() if path_of(table):
            for value, part in look(table):
                if value is not table and part is None:
                    yield from elements(value, look, depth + 1)


def _each(over: ast.expr, place: tuple[int, ...], look: Look, depth: int) -> Iterator[Bound]:
    called = name_of(over.func) if isinstance(over, ast.Call) else ""
    method = over.func.attr if isinstance(over, ast.Call) and isinstance(over.func, ast.Attribute) else ""
    if isinstance(over, ast.Call) and called == "enumerate" and over.args and place[:1] == (1,):
        yield from _each(over.args[0], place[1:], look, depth + 1)
    elif isinstance(over, ast.Call) and called == "zip" and place and place[0] < len(over.args):
        yield from _each(over.args[place[0]], place[1:], look, depth + 1)
    elif (
        isinstance(over, ast.Call) and method == "items" and place[:1] == (1,) and isinstance(over.func, ast.Attribute)
    ):
        yield from _each(over.func.value, place[1:], look, depth + 1)
    elif not place:
        yield from elements(over, look)
    else:
        for entry, _ in elements(over, look):
            whole = entry
            for index in place:
                whole = whole.elts[index] if _has(whole, index) else ast.Constant(value=None)  # type: ignore[attr-defined]
            if not isinstance(whole, ast.Constant):
                yield whole, None


def _has(node: ast.expr, index: int) -> bool:
    return isinstance(node, ast.Tuple | ast.List) and index < len(node.elts)


def _place(target: ast.expr, name: str) -> tuple[int, ...] | None:
    """Where in a target a name stands: (1, 0) in `i, (x, y)` for x."""
    if isinstance(target, ast.Tuple | ast.List):
        for i, part in enumerate(target.elts):
            inner = _place(part, name)
            if inner is not None:
                return (i, *inner)
    return () if isinstance(target, ast.Name) and target.id == name else None


def _is_in(script: Script, node: ast.AST, over: ast.expr) -> bool:
    place: ast.AST | None = node
    while place is not None and not isinstance(place, ast.stmt):
        if place is over:
            return True
        place = script.parents.get(place)
    return False
