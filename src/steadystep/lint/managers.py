"""Context managers and decorators: torch's own that switch gradients off, and those of the file."""

import ast

from steadystep.lint.control import is_no_grad, surely_off
from steadystep.lint.names import last, name_of
from steadystep.lint.script import Function, Script
from steadystep.lint.sources import sources
from steadystep.lint.targets import target_of

_MAKES = ("contextmanager", "asynccontextmanager")


def managed_by(given: ast.expr, script: Script) -> list[Function]:
    """What runs around the body of a `with`: a generator of this file, or `__enter__` and `__exit__` of a class."""
    if not isinstance(given, ast.Call):
        return []
    function = target_of(given, script)
    if function is not None and any(last(name_of(d)) in _MAKES for d in function.decorator_list):
        return [function]
    owner = script.classes.get(last(name_of(given.func)))
    methods = {m.name: m for m in owner.body if isinstance(m, ast.FunctionDef)} if owner is not None else {}
    return [methods["__enter__"], methods["__exit__"]] if {"__enter__", "__exit__"} <= methods.keys() else []


def inner_body(stmt: ast.With | ast.AsyncWith, items: list[ast.withitem]) -> list[ast.stmt]:
    """What runs inside of one manager of a `with`: the others, and then the body."""
    return [ast.copy_location(ast.With(items=items, body=stmt.body), stmt)] if items else stmt.body


def switches_off(given: ast.AST, script: Script) -> bool:
    """Whether gradients are surely off inside of a manager, or of a function through what decorates it."""
    if isinstance(given, ast.FunctionDef | ast.AsyncFunctionDef):
        return any(switches_off(d, script) for d in given.decorator_list)
    if is_no_grad(given):
        return surely_off(given)
    if isinstance(given, ast.Name | ast.Attribute) and not isinstance(script.parents.get(given), ast.Call):
        made = [v for v, _ in sources(script, given) if v is not given]
        if made:
            return all(isinstance(v, ast.Call) and is_no_grad(v) and surely_off(v) for v in made)
    name = name_of(given.func if isinstance(given, ast.Call) else given)
    functions = script.functions.get(name, []) if name else []
    return len(functions) == 1 and _off_inside(functions[0])


def _off_inside(function: Function) -> bool:
    """`with torch.no_grad(): yield`, or `with torch.no_grad(): return fn(...)`."""
    if not any(isinstance(n, ast.FunctionDef | ast.Lambda | ast.Yield) for s in function.body for n in ast.walk(s)):
        return False
    for node in ast.walk(function):
        if isinstance(node, ast.With) and any(
            is_no_grad(i.context_expr) and surely_off(i.context_expr) for i in node.items
        ):
            return any(isinstance(n, ast.Yield | ast.Return) for n in ast.walk(node))
        if (
            isinstance(node, ast.FunctionDef)
            and node is not function
            and any(is_no_grad(d) for d in node.decorator_list)
        ):
            return True
    return False
