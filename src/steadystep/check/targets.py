"""Which function of the same file a call runs."""

import ast

from steadystep.check.names import last, name_of
from steadystep.check.script import Function, Script


def target_of(call: ast.Call, script: Script) -> Function | None:
    """The function in this file that a call runs, when there is just one it can be."""
    name = name_of(call.func)
    if not name:
        return None
    if "." not in name:
        functions = [f for f in script.functions.get(name, ()) if script.class_of(f) is None]
        if len(functions) == 1:
            return functions[0]
        return _method(_class_of_value(name, call, script), "__call__")
    owner, _, method = name.rpartition(".")
    if owner == "self":
        mine = script.class_of(call)
        return _method(mine, method) or _method(_class_of_value(name, call, script), "__call__")
    return _method(_class_of_value(owner, call, script), method)


def _class_of_value(name: str, at: ast.AST, script: Script) -> ast.ClassDef | None:
    made = {
        last(name_of(v.func)) if isinstance(v, ast.Call) else "" for v in script.values(name, at)
    } & script.classes.keys()
    return script.classes[made.pop()] if len(made) == 1 else None


def _method(owner: ast.ClassDef | None, name: str) -> Function | None:
    body = owner.body if owner else []
    return next((m for m in body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef) and m.name == name), None)
