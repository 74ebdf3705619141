"""Networks that are trained in fp16 or bf16 as a whole: `.half()`, `.to(torch.float16)`, anywhere on the way."""

import ast
from collections.abc import Iterator

from steadystep.lint.constructors import fulls_of
from steadystep.lint.context import Context
from steadystep.lint.names import last, name_of, path_of
from steadystep.lint.networks import Network, networks_of
from steadystep.lint.script import Script
from steadystep.lint.sources import maker_of, unwrapped

_DEEPEST = 6


def cast_networks(context: Context, types: tuple[str, ...], method: str) -> list[ast.Call]:
    """Calls that cast a network which an optimizer of the file holds, made before its training begins."""
    script = context.script
    made = [c for calls in list(script.calls.values()) for c in calls if context.roles.is_optimizer(c)]
    found: list[ast.Call] = []
    if len(made) != 1:
        return found
    optimizer = made[0]
    stmt = script.stmt_of(optimizer)
    name = path_of(stmt.targets[0]) if isinstance(stmt, ast.Assign) else ""
    held = networks_of(script, context.roles, name, optimizer) if name else None
    names = context.roles.networks_of(optimizer)
    for network in held or [Network(n, optimizer) for n in names or ()]:
        for call in _on_the_way(script, network.path, network.at, 0):
            if _casts(script, call, types, method) and not _conditional(script, call):
                found.append(call)
    return found + [c for c in _as_statements(script, optimizer, names or [], types, method) if c not in found]


def _casts(script: Script, call: ast.Call, types: tuple[str, ...], method: str) -> bool:
    leaf = call.func.attr if isinstance(call.func, ast.Attribute) else name_of(call.func)
    if leaf == method and not call.args:
        return True
    given = [*call.args, *(k.value for k in call.keywords)] if leaf == "to" else []
    return any(fulls_of(g, script) <= set(types) for g in given if fulls_of(g, script))


def _on_the_way(script: Script, name: str, at: ast.AST, depth: int) -> Iterator[ast.Call]:
    """Every call that a network went through, from what is made to the name; not where there are two ways."""
    values = list({id(v): v for v in script.values(name, at)}.values())
    if len(values) == 1 and depth < _DEEPEST:
        yield from _in_value(script, values[0], depth)


def _in_value(script: Script, value: ast.expr, depth: int) -> Iterator[ast.Call]:
    if depth > _DEEPEST:
        return
    if path_of(value):
        yield from _on_the_way(script, path_of(value), value, depth + 1)
    if not isinstance(value, ast.Call):
        return
    yield value
    inner = unwrapped(script, value)
    maker = maker_of(script, value) if inner is None else None
    if inner is not None:
        yield from _in_value(script, inner, depth + 1)
    elif maker is not None:
        returns = [n.value for n in ast.walk(maker) if isinstance(n, ast.Return) and n.value is not None]
        for given in returns if len(returns) == 1 else ():
            yield from _in_value(script, given, depth + 1)
    elif last(name_of(value.func)) in script.classes:
        for given in (*value.args, *(k.value for k in value.keywords)):
            yield from _in_value(script, given, depth + 1)


def _as_statements(
    script: Script, optimizer: ast.Call, names: list[str], types: tuple[str, ...], method: str
) -> Iterator[ast.Call]:
    """`model.half()` on a line of its own, or `model = model.half()`, above the optimizer."""
    for leaf in ("to", method):
        for call in script.calls.get(leaf, ()):
            stmt = script.stmt_of(call)
            owner = name_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
            target = name_of(stmt.targets[0]) if isinstance(stmt, ast.Assign) else owner
            same = script.scope_of(call) is script.scope_of(optimizer)
            if len(names) != 1 or target not in names or not same or not _casts(script, call, types, method):
                continue
            if stmt.lineno < optimizer.lineno and not script.loops_of(call) and not _conditional(script, call):
                yield call


def _conditional(script: Script, call: ast.Call) -> bool:
    return any(isinstance(a, ast.If | ast.IfExp) for a in script.ancestors(call))
