"""The last layer of an `nn.Sequential`, as it is written or put together."""

import ast

from steadystep.lint.names import last, name_of
from steadystep.lint.script import Script


def tail_of(script: Script, made: ast.Call) -> ast.expr | None:
    """The last layer: of the arguments, of a list that is unpacked, of an `OrderedDict`."""
    tail = made.args[-1] if made.args else None
    if isinstance(tail, ast.Starred) and isinstance(tail.value, ast.Name):
        return _last_put(script, tail.value.id, made)
    if isinstance(tail, ast.Call) and last(name_of(tail.func)) == "OrderedDict" and tail.args:
        listed = tail.args[0].elts if isinstance(tail.args[0], ast.List) else []
        return (
            listed[-1].elts[1] if listed and isinstance(listed[-1], ast.Tuple) and len(listed[-1].elts) == 2 else None
        )
    return tail


def _last_put(script: Script, name: str, made: ast.Call) -> ast.expr | None:
    """What was put last at the end of a list, in the same block: `append`, `+= [...]`, `[-1] = ...`."""
    block = getattr(script.parents.get(script.stmt_of(made)), "body", [])
    found: ast.expr | None = None
    for stmt in (s for s in block if s.lineno <= made.lineno):
        match stmt:
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr="append", value=owner), args=[given])):
                found = given if name_of(owner) == name else found
            case ast.AugAssign(op=ast.Add(), value=ast.List(elts=[*_, given])) if name_of(stmt.target) == name:
                found = given
            case ast.Assign(targets=[ast.Subscript(value=owner, slice=place)], value=given):
                end = isinstance(place, ast.UnaryOp) and getattr(place.operand, "value", None) == 1
                found = given if name_of(owner) == name and end else found
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.List(elts=[*_, given])) if target == name:
                found = given
            case ast.For() | ast.While() if any(name_of(n) == name for n in ast.walk(stmt)):
                found = None
    return found
