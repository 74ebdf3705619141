"""Which type mixed precision has in a script and whether it is on; networks that are fp16 or bf16 as a whole."""

import ast
from collections.abc import Iterator

from steadystep.lint.constructors import fulls_of, setting
from steadystep.lint.context import Context
from steadystep.lint.names import argument, last, name_of, parameters, path_of
from steadystep.lint.networks import Network, networks_of
from steadystep.lint.script import Script
from steadystep.lint.sources import maker_of, sources, without_wrappers

FP16 = ("torch.float16", "torch.half")
BF16 = ("torch.bfloat16",)
_HALF_WORDS = frozenset(["fp16", "float16", "half", "16", "16-mixed", "f16"])
_DEEPEST = 6


def casts_of(script: Script) -> list[ast.Call]:
    """Every autocast, and every `partial` of one."""
    found = [c for c in script.calls.get("autocast", ()) if _is_autocast(script, c)]
    return found + [c for c in script.calls.get("partial", ()) if c.args and "autocast" in script.full(c.args[0])]


def _is_autocast(script: Script, call: ast.Call) -> bool:
    return "autocast" in script.full(call.func) and not script.full(call.func).startswith("self.")


def dtype_of(script: Script, call: ast.Call) -> str:
    """`fp16`, `bf16`, or empty when the file does not say."""
    full = script.full(call.func)
    given = next(iter(setting(call, script, "dtype")), None)
    old = ".cuda.amp." in full
    if last(full) == "partial" and given is None:
        return ""
    if given is None and len(call.args) > 1 and not old and not isinstance(call.args[1], ast.Constant):
        given = call.args[1]
    if given is not None:
        names = fulls_of(given, script)
        if _may_be_brain(script, given):
            return ""
        if names and names <= set(FP16):
            return "fp16"
        return "bf16" if names and names <= set(BF16) and not _may_be_half(script, given) else ""
    if old:
        return "fp16"
    device = argument(call, 0, "device_type")
    return "fp16" if isinstance(device, ast.Constant) and str(device.value).startswith("cuda") else ""


def _may_be_brain(script: Script, given: ast.expr) -> bool:
    """A parameter, or a name of a loop, in a file that has bf16 elsewhere than in a table: callers may give either."""
    scope = script.scope_of(given)
    if not isinstance(given, ast.Name) or scope is None or (scope, given.id) in script.assigned:
        return False
    for node in script.nodes:
        if isinstance(node, ast.Attribute) and script.full(node) in BF16:
            around = script.parents.get(node)
            if not isinstance(around, ast.Dict | ast.Compare) and given.id in parameters(scope):
                return True
    return False


def _may_be_half(script: Script, given: ast.expr) -> bool:
    """An option with which the user can also ask for fp16, or a table that has it too."""
    seen = [n for value, _ in sources(script, given) for n in ast.walk(value)] + list(ast.walk(given))
    texts = [v for n in seen if isinstance(n, ast.expr) for v, _ in sources(script, n) if isinstance(v, ast.Constant)]
    for text in texts:
        around = script.parents.get(script.parents.get(text, text))
        options = [k.value for k in around.keywords if k.arg == "choices"] if isinstance(around, ast.Call) else []
        words = {str(getattr(n, "value", "")) for o in options for v, _ in sources(script, o) for n in ast.walk(v)}
        if words & _HALF_WORDS:
            return True
    tables = [v for n in ast.walk(given) if isinstance(n, ast.Subscript) for v, _ in sources(script, n.value)]
    return any(script.full(e) in FP16 for t in tables if isinstance(t, ast.Dict) for e in t.values)


def always_on(script: Script, call: ast.Call) -> bool:
    """Nothing switches it off, or what does is set to True in the file."""
    enabled = setting(call, script, "enabled")
    found = [v for e in enabled for v, _ in sources(script, e)]
    return all(isinstance(v, ast.Constant) and v.value is True for v in found)


def may_be_on(script: Script, call: ast.Call) -> bool:
    """On, or switched by something that the file does not set to False."""
    enabled = setting(call, script, "enabled")
    if not enabled or isinstance(enabled[0], ast.Constant):
        return always_on(script, call)
    values = [v for v, _ in sources(script, enabled[0])]
    return not isinstance(enabled[0], ast.Compare) and not any(getattr(v, "value", None) is False for v in values)


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
    inner = without_wrappers(script, value)
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
