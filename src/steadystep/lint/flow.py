"""Where a question in a script has one answer: flags that a caller sets, phases that a loop goes through."""

import ast
from collections.abc import Mapping

from steadystep.lint.names import name_of
from steadystep.lint.script import Script

UNKNOWN = object()
"""Not told by the file."""

_DEEPEST = 4


def answer(test: ast.expr, known: Mapping[str, object], script: Script, depth: int = 0) -> object:
    """What an expression is, with what is known of the names in it; `UNKNOWN` else."""
    if depth > _DEEPEST:
        return UNKNOWN
    match test:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return known[name] if name in known else _local(name, test, known, script, depth)
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            found = answer(inner, known, script, depth + 1)
            return UNKNOWN if found is UNKNOWN else not found
        case ast.BoolOp():
            return _joined(test, known, script, depth)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _compared(op, answer(left, known, script, depth + 1), right, known, script, depth)
        case ast.Call(func=ast.Name(id="bool"), args=[inner]):
            found = answer(inner, known, script, depth + 1)
            return UNKNOWN if found is UNKNOWN else bool(found)
    return UNKNOWN


def _local(name: str, at: ast.expr, known: Mapping[str, object], script: Script, depth: int) -> object:
    """`training = optimizer is not None`, assigned once in the same function."""
    scope = script.scope_of(at)
    assigned = script.assigned.get((scope, name), ()) if scope is not None else ()
    if len(assigned) != 1 or not isinstance(assigned[0][1], ast.Compare | ast.UnaryOp | ast.BoolOp | ast.Call):
        return UNKNOWN
    if isinstance(assigned[0][1], ast.Call) and name_of(assigned[0][1].func) != "bool":
        return UNKNOWN
    return answer(assigned[0][1], known, script, depth + 1)


def _joined(test: ast.BoolOp, known: Mapping[str, object], script: Script, depth: int) -> object:
    found = [answer(value, known, script, depth + 1) for value in test.values]
    decides = isinstance(test.op, ast.Or)
    for value in found:
        if value is not UNKNOWN and bool(value) is decides:
            return decides
    return UNKNOWN if any(value is UNKNOWN for value in found) else not decides


def _compared(
    op: ast.cmpop, left: object, right: ast.expr, known: Mapping[str, object], script: Script, depth: int
) -> object:
    if isinstance(op, ast.In | ast.NotIn):
        parts = right.elts if isinstance(right, ast.Tuple | ast.List | ast.Set) else []
        values = [answer(part, known, script, depth + 1) for part in parts]
        if left is UNKNOWN or not values or UNKNOWN in values:
            return UNKNOWN
        return (left in values) == isinstance(op, ast.In)
    other = answer(right, known, script, depth + 1)
    if left is UNKNOWN or other is UNKNOWN:
        return UNKNOWN
    if isinstance(op, ast.Eq | ast.NotEq | ast.Is | ast.IsNot):
        same = left is other if left is None or other is None else left == other
        return same == isinstance(op, ast.Eq | ast.Is)
    return UNKNOWN
