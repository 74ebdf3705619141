"""Whose parameters an expression is: `model.parameters()`, a filtered list of them, several joined, in groups."""

import ast

from steadystep.check.names import last, name_of, path_of
from steadystep.check.script import Script

_ALL = ("parameters", "named_parameters")
_JOIN = ("chain", "list", "tuple", "iter", "set")


def networks_in(params: ast.expr, script: Script, at: ast.AST, depth: int = 0) -> list[str] | None:
    """The networks, in order; None when some of it is not known."""
    if depth > 4:
        return None
    parts = _parts(params, script, at)
    if parts is None:
        return None
    found: list[str] = []
    for part in parts:
        if isinstance(part, str):
            inner: list[str] | None = [part]
        else:
            inner = networks_in(part, script, at, depth + 1)
        if inner is None:
            return None
        found += [name for name in inner if name not in found]
    return found or None


def _parts(params: ast.expr, script: Script, at: ast.AST) -> list[str | ast.expr] | None:
    if isinstance(params, ast.Starred):
        return [params.value]
    if isinstance(params, ast.Call):
        return _of_call(params)
    if isinstance(params, ast.ListComp | ast.GeneratorExp) and len(params.generators) == 1:
        return [params.generators[0].iter]
    if isinstance(params, ast.List | ast.Tuple):
        return list(params.elts)
    if isinstance(params, ast.BinOp) and isinstance(params.op, ast.Add):
        return [params.left, params.right]
    if isinstance(params, ast.Dict):
        pairs = zip(params.keys, params.values, strict=True)
        return [v for k, v in pairs if isinstance(k, ast.Constant) and k.value == "params"]
    if isinstance(params, ast.Name):
        values = {id(v): v for v in script.values(params.id, at)}
        changed = any(
            isinstance(n, ast.AugAssign | ast.Attribute)
            and name_of(getattr(n, "target", getattr(n, "value", None))) == params.id
            for n in script.nodes
        )
        return list(values.values()) if len(values) == 1 and not changed else None
    return None


def _of_call(call: ast.Call) -> list[str | ast.expr] | None:
    if isinstance(call.func, ast.Attribute) and call.func.attr in _ALL:
        owner = path_of(call.func.value)
        return [owner] if owner else None
    leaf = last(name_of(call.func))
    if leaf == "filter" and len(call.args) == 2:
        return [call.args[1]]
    return list(call.args) if leaf in _JOIN and call.args else None
