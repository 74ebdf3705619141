"""Where a value comes from: through assignments, tuples, tables, and functions of the same file that give it back."""

import ast

from steadystep.lint.names import last, name_of, path_of
from steadystep.lint.script import Function, Script
from steadystep.lint.targets import forward_of, target_of

Part = str | int | None
"""Which entry or field of a value is meant; None for the whole."""

ValueOrigin = tuple[ast.stmt, ast.expr]

_DEEPEST = 8


def origins(script: Script, expr: ast.expr | None, at: ast.AST, part: Part = None, depth: int = 0) -> list[ValueOrigin]:
    """Every expression that a value may be, with its statement; empty when the file does not tell.

    `loss` of `loss, acc = step(batch)`, `out["loss"]` and `out.loss` of `out = step(batch)`, `step(batch)["loss"]`.
    """
    if expr is None or depth > _DEEPEST:
        return []
    match expr:
        case ast.Subscript(slice=ast.Constant(value=str() | int() as key)) if part is None:
            return origins(script, expr.value, at, key, depth + 1)
        case ast.Attribute(value=ast.Name(id=name)) if part is None and _is_field(script, expr, name, at):
            return origins(script, expr.value, at, expr.attr, depth + 1)
        case ast.Name():
            return _of_name(script, expr.id, at, part, depth)
        case ast.NamedExpr():
            return origins(script, expr.value, at, part, depth + 1)
        case ast.Call() if runs(expr, script) is not None:
            return _of_call(script, expr, part, depth)
    if part is None:
        return [(script.stmt_of(expr), expr)]
    held = _held(expr, part)
    return origins(script, held, at, None, depth + 1)


def runs(call: ast.Call, script: Script) -> Function | None:
    """The function, the method or the forward of a network of this file that a call runs."""
    return target_of(call, script) or forward_of(call, script)


def straight(script: Script, first: ast.stmt, then: ast.stmt) -> bool:
    """Whether an assignment is sure to be met: it stands in the same block, in one around it, or in a `with` there."""
    place = script.parents.get(first)
    while isinstance(place, ast.With | ast.AsyncWith):
        place = script.parents.get(place)
    scope = script.scope_of(then) or script.tree
    return place in (scope, script.parents.get(then), *script.ancestors(then))


def _is_field(script: Script, expr: ast.Attribute, name: str, at: ast.AST) -> bool:
    """A field of a record that is made here, and nothing that every tensor has."""
    return expr.attr not in ("data", "grad", "T", "mT", "real") and (script.scope_of(at), name) in script.assigned


def _of_name(script: Script, name: str, at: ast.AST, part: Part, depth: int) -> list[ValueOrigin]:
    found, then = script.reaching(name, at), script.stmt_of(at)
    if found is None or not straight(script, found[0], then):
        return []
    stmt, value = found
    if part is not None:
        written = f"{name}[{part!r}]"
        later = script.reaching(written, at) or script.reaching(f"{name}.{part}", at)
        if later is not None and later[0].lineno > stmt.lineno:
            return origins(script, later[1], later[0], None, depth + 1) if straight(script, later[0], then) else []
    if _changed_between(script, name, stmt, then):
        return []
    target = stmt.targets[0] if isinstance(stmt, ast.Assign) else None
    if isinstance(target, ast.Tuple | ast.List) and not isinstance(value, ast.Name | ast.Constant):
        names = [name_of(t) for t in target.elts]
        whole = isinstance(stmt, ast.Assign) and value is stmt.value
        if whole:  # several names share what could not be taken apart
            starred = any(isinstance(t, ast.Starred) for t in target.elts)
            index = names.index(name) if name in names and not starred and part is None else None
            return [] if index is None else origins(script, value, stmt, index, depth + 1)
    return origins(script, value, stmt, part, depth + 1)


def _changed_between(script: Script, name: str, first: ast.stmt, then: ast.stmt) -> bool:
    key = ("changed", name)
    if key not in script.memo:
        script.memo[key] = [n for n in script.nodes if isinstance(n, ast.AugAssign) and name_of(n.target) == name]
    scope = script.scope_of(then)
    return any(first.lineno < n.lineno <= then.lineno and script.scope_of(n) is scope for n in script.memo[key])


def _of_call(script: Script, call: ast.Call, part: Part, depth: int) -> list[ValueOrigin]:
    function = runs(call, script)
    assert function is not None
    nodes = [n for n in ast.walk(function) if script.scope_of(n) is function]
    if any(isinstance(n, ast.Yield | ast.YieldFrom) for n in nodes):
        return []
    found: list[ValueOrigin] = []
    for node in (n for n in nodes if isinstance(n, ast.Return)):
        inner = origins(script, node.value, node, part, depth + 1)
        if not inner:
            return []
        found += inner
    return found


def _held(expr: ast.expr, part: str | int) -> ast.expr | None:
    """An entry of a tuple, a table or a record that is written out."""
    if isinstance(expr, ast.Tuple | ast.List) and isinstance(part, int):
        plain = not any(isinstance(e, ast.Starred) for e in expr.elts)
        return expr.elts[part] if plain and -len(expr.elts) <= part < len(expr.elts) else None
    if isinstance(expr, ast.Dict):
        pairs = zip(expr.keys, expr.values, strict=True)
        return next((v for k, v in pairs if isinstance(k, ast.Constant) and k.value == part), None)
    made = last(path_of(expr.func)) if isinstance(expr, ast.Call) else ""
    if isinstance(expr, ast.Call) and (made in ("dict", "SimpleNamespace") or made[:1].isupper()):
        return next((k.value for k in expr.keywords if k.arg == part), None)
    return None
