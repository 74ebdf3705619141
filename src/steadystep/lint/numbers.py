"""What a number in a script is, where the file says it: through names, configs and the defaults of options."""

import ast
import math

from steadystep.lint.names import name_of, path_of
from steadystep.lint.script import Script
from steadystep.lint.sources import maker_of


def number_at(node: ast.expr | None, script: Script, at: ast.AST, depth: int = 0) -> float | None:
    """The number an expression stands for, when the file says it and says it once."""
    if node is None or depth > 8:
        return None
    if isinstance(node, ast.Constant):
        return float(node.value) if isinstance(node.value, int | float) and not isinstance(node.value, bool) else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = number_at(node.operand, script, at, depth + 1)
        return None if inner is None else -inner
    if isinstance(node, ast.BinOp):
        left, right = number_at(node.left, script, at, depth + 1), number_at(node.right, script, at, depth + 1)
        return _apply(node.op, left, right) if left is not None and right is not None else None
    if isinstance(node, ast.Name | ast.Attribute):
        # why at the value: what it is made of is named in the function where it stands
        found = {number_at(value, script, value, depth + 1) for value in script.values(name_of(node), at)}
        return found.pop() if len(found) == 1 else None
    if isinstance(node, ast.Subscript):
        found = {number_at(value, script, value, depth + 1) for value in script.values(path_of(node), at)}
        return found.pop() if len(found) == 1 else None
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
        first = number_at(node.values[0], script, at, depth + 1)
        return first or None
    if isinstance(node, ast.Call):
        return _of_call(node, script, at, depth)
    return None


def _of_call(node: ast.Call, script: Script, at: ast.AST, depth: int) -> float | None:
    called = name_of(node.func)
    if isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
        key = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
        table = path_of(node.func.value)
        listed = script.values(f"{table}[{key!r}]", at) if table and isinstance(key, str) else []
        found = {number_at(value, script, value, depth + 1) for value in listed or node.args[1:2]}
        return found.pop() if len(found) == 1 else None
    if called == "getattr" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
        listed = script.values(f"{path_of(node.args[0])}.{node.args[1].value!s}", at)
        found = {number_at(value, script, value, depth + 1) for value in listed or node.args[2:3]}
        return found.pop() if len(found) == 1 else None
    if called in ("float", "int") and len(node.args) == 1:
        return _of_text(node.args[0]) or number_at(node.args[0], script, at, depth + 1)
    if called in ("min", "max") and node.args and not node.keywords:
        all_of = [number_at(a, script, at, depth + 1) for a in node.args]
        known = [n for n in all_of if n is not None]
        return None if len(known) != len(all_of) else min(known) if called == "min" else max(known)
    made = maker_of(script, node)
    returns = [n for n in ast.walk(made) if isinstance(n, ast.Return)] if made is not None else []
    return number_at(returns[0].value, script, returns[0], depth + 1) if len(returns) == 1 else None


def _of_text(node: ast.expr) -> float | None:
    """`float("1e-3")`, and the same from the environment with a default."""
    if isinstance(node, ast.Call) and name_of(node.func) in ("os.environ.get", "os.getenv", "environ.get", "getenv"):
        node = node.args[1] if len(node.args) > 1 else node
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return None
    try:
        return float(node.value)
    except ValueError:
        return None


def written_at(node: ast.expr, script: Script, at: ast.AST) -> ast.AST:
    """Where a number is written: the default of an option, the field of a config; else the place itself."""
    place: ast.expr = node
    looked_up = isinstance(node, ast.Attribute | ast.Subscript)
    for _ in range(4):
        if not isinstance(place, ast.Attribute | ast.Subscript | ast.Name):
            break
        looked_up = looked_up or isinstance(place, ast.Attribute | ast.Subscript)
        values = {id(v): v for v in script.values(path_of(place), at)}
        if len(values) != 1:
            return node
        place = at = next(iter(values.values()))
    declared = isinstance(place, ast.Constant) and script.scope_of(place) is not script.scope_of(node)
    return place if declared and looked_up else node


def _apply(op: ast.operator, left: float, right: float) -> float | None:
    try:
        match op:
            case ast.Add():
                result = left + right
            case ast.Sub():
                result = left - right
            case ast.Mult():
                result = left * right
            case ast.Div():
                result = left / right
            case ast.Pow():
                result = left**right if abs(right) < 64 else math.inf
            case _:
                return None
    except (ArithmeticError, ValueError):
        return None
    return result if isinstance(result, float) else None  # a complex number is no number here
