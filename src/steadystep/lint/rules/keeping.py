"""Methods that keep what they are given: added to an attribute, or appended to it."""

import ast

from steadystep.lint.bindings import Function
from steadystep.lint.names import name_of
from steadystep.lint.rules.lists import held_by

FORGETS = ("clear", "pop", "popleft")
"""Methods that let go of what was kept."""


def keeps(function: Function, name: str, *, changed: bool = False) -> str:
    """The attribute that a parameter is added to or appended to as it is; empty when it is cut or changed first."""
    if not name:
        return ""
    for node in ast.walk(function):
        if not changed and isinstance(node, ast.Assign) and name in {name_of(t) for t in node.targets}:
            return ""
    for loop in (n for n in ast.walk(function) if isinstance(n, ast.For)):
        over = (
            loop.iter.func.value
            if isinstance(loop.iter, ast.Call) and isinstance(loop.iter.func, ast.Attribute)
            else loop.iter
        )
        if name_of(over) == name:  # for k, v in kw.items()
            parts = loop.target.elts if isinstance(loop.target, ast.Tuple) else [loop.target]
            stored = {
                name_of(t) for s in loop.body for n in ast.walk(s) if isinstance(n, ast.Assign) for t in n.targets
            }
            name = name_of(parts[-1]) if name_of(parts[-1]) not in stored else ""
    return next((kept for kept, _ in (kept_in(node, {name}) for node in ast.walk(function)) if kept), "")


def kept_in(node: ast.AST, names: set[str]) -> tuple[str, ast.expr | None]:
    """(attribute, what is kept) of `self.total += x`, `self.total = self.total + x` and `self.all.append(x)`."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        target = node.target.value if isinstance(node.target, ast.Subscript) else node.target
        given = _bare(node.value, names)
        return (_attribute(target), given) if given is not None else ("", None)
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0].value if isinstance(node.targets[0], ast.Subscript) else node.targets[0]
        ways = [node.value.body, node.value.orelse] if isinstance(node.value, ast.IfExp) else [node.value]
        for way in ways:
            own = name_of(target) in {name_of(n) for n in ast.walk(way)} and isinstance(way, ast.BinOp)
            given = _bare(way, names) if own and isinstance(way, ast.BinOp) and isinstance(way.op, ast.Add) else None
            if given is not None:
                return _attribute(target), given
        return "", None
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append"
    if isinstance(node, ast.Call) and called and len(node.args) == 1 and name_of(node.args[0]) in names:
        held = held_by(node)
        return (held if held.startswith("self.") else "", node.args[0])
    return "", None


def _attribute(node: ast.expr) -> str:
    return name_of(node) if name_of(node).startswith("self.") else ""


def _bare(node: ast.expr, names: set[str]) -> ast.expr | None:
    """The value itself in a sum or a product."""
    if isinstance(node, ast.BinOp):
        return _bare(node.left, names) or _bare(node.right, names)
    if isinstance(node, ast.List):
        return next((found for found in (_bare(part, names) for part in node.elts) if found is not None), None)
    return node if name_of(node) in names else None


def empties(function: Function, kept: str) -> bool:
    """Whether a method begins anew with what it keeps."""
    begins = {
        s
        for n in ast.walk(function)
        if isinstance(n, ast.If) and kept in {name_of(p) for p in ast.walk(n.test)} and "None" in ast.unparse(n.test)
        for s in n.body
    }
    for node in ast.walk(function):
        if node in begins:
            continue  # the first value, not a new beginning
        if isinstance(node, ast.Attribute) and node.attr in FORGETS and name_of(node.value) == kept:
            return True
        stored = (
            {name_of(t) for target in node.targets for t in ast.walk(target)} if isinstance(node, ast.Assign) else set()
        )
        if isinstance(node, ast.Assign) and kept in stored and kept not in {name_of(n) for n in ast.walk(node.value)}:
            return True
        if isinstance(node, ast.Delete):
            return True
        called = name_of(node.func) if isinstance(node, ast.Call) else ""
        if called in ("self.reset", "self.clear", "self.__init__"):
            return True
    return False
