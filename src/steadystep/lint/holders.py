"""Whose parameters an expression is: `model.parameters()`, a filtered list of them, several joined, in groups."""

import ast

from steadystep.lint.names import last, name_of, path_of
from steadystep.lint.script import Script

_ALL = ("parameters", "named_parameters")
_JOIN = ("chain", "from_iterable", "list", "tuple", "iter", "set", "sum")


def networks_in(params: ast.expr, script: Script, at: ast.AST, depth: int = 0) -> list[str] | None:
    """The networks, in order; None when some of it is not known."""
    if depth > 6:
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
    if isinstance(params, ast.ListComp | ast.GeneratorExp):
        return _of_comprehension(params)
    if isinstance(params, ast.List | ast.Tuple):
        return list(params.elts)
    if isinstance(params, ast.BinOp) and isinstance(params.op, ast.Add):
        return [params.left, params.right]
    if isinstance(params, ast.Dict):
        pairs = zip(params.keys, params.values, strict=True)
        return [v for k, v in pairs if isinstance(k, ast.Constant) and k.value == "params"]
    if path_of(params):
        name = path_of(params)
        values = {id(v): v for v in script.values(name, at)}
        changed = any(
            isinstance(n, ast.AugAssign | ast.Attribute)
            and path_of(getattr(n, "target", getattr(n, "value", None))) == name
            for n in script.nodes
        )
        return list(values.values()) if len(values) == 1 and not changed else None
    return None


def _of_comprehension(params: ast.ListComp | ast.GeneratorExp) -> list[str | ast.expr] | None:
    """`[p for p in net.parameters() if ...]`, and `[p for net in (a, b) for p in net.parameters()]`."""
    if len(params.generators) == 1:
        return [params.generators[0].iter]
    outer, inner = params.generators[0], params.generators[-1]
    source = inner.iter
    if len(params.generators) != 2 or not isinstance(source, ast.Call) or not isinstance(source.func, ast.Attribute):
        return None
    listed = outer.iter.elts if isinstance(outer.iter, ast.Tuple | ast.List) else []
    if source.func.attr not in _ALL or name_of(source.func.value) != name_of(outer.target) or not listed:
        return None
    paths = [path_of(entry) for entry in listed]
    return list(paths) if all(paths) else None


def _of_call(call: ast.Call) -> list[str | ast.expr] | None:
    if isinstance(call.func, ast.Attribute) and call.func.attr in _ALL:
        owner = path_of(call.func.value)
        return [owner] if owner else None
    leaf = last(name_of(call.func))
    if leaf == "filter" and len(call.args) == 2:
        return [call.args[1]]
    if leaf == "dict":
        return [k.value for k in call.keywords if k.arg == "params"] or None
    return list(call.args) if leaf in _JOIN and call.args else None
