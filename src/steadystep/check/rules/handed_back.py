"""SS302 across a call: a function trains on a loss, hands it back with its graph, and the caller adds it up."""

import ast
from collections.abc import Iterator

from steadystep.check.context import Context, hit
from steadystep.check.hit import Hit
from steadystep.check.names import name_of
from steadystep.check.rules.trained import trained_losses
from steadystep.check.script import Function, Script
from steadystep.check.targets import target_of


def handed_back(context: Context) -> Iterator[Hit]:
    """`total += train_step(batch)`, and the same with a name in between."""
    script, losses = context.script, set(trained_losses(context))
    for node in script.nodes:
        if not isinstance(node, ast.AugAssign) or not isinstance(node.op, ast.Add) or not script.loops_of(node):
            continue
        value: ast.expr | None = node.value
        if isinstance(value, ast.Name):
            found = script.reaching(value.id, node)
            value = found[1] if found is not None and isinstance(found[0], ast.Assign) and _whole(found[0]) else None
        function = target_of(value, script) if isinstance(value, ast.Call) else None
        total = name_of(node.target)
        if function is None or not _hands_back(script, function, losses) or _is_trained_on(script, total):
            continue
        diff = context.edit().replace(node.value, f"{ast.unparse(node.value)}.item()").diff()
        message = f"{total} adds up what {function.name} hands back, with its graph"
        yield hit("SS302", node, message, diff=diff)


def _whole(stmt: ast.Assign) -> bool:
    return isinstance(stmt.targets[0], ast.Name)


def _hands_back(script: Script, function: Function, losses: set[tuple[Function | None, str]]) -> bool:
    """Every return is a loss that was trained on in it, as it is, and nothing cut it in between."""
    words = {n.attr for n in ast.walk(function) if isinstance(n, ast.Attribute)}
    if not {"backward", "step"} <= words:
        return False
    returns = [n for n in ast.walk(function) if isinstance(n, ast.Return) and script.scope_of(n) is function]
    names = [name_of(r.value) for r in returns]
    trained = [c.lineno for c in script.calls.get("backward", ()) if script.scope_of(c) is function]
    late = [s for n in names for s, _ in script.assigned.get((function, n), ()) if s.lineno > max(trained, default=0)]
    return bool(names) and not late and all((function, name) in losses for name in names)


def _is_trained_on(script: Script, total: str) -> bool:
    return any(total in ast.unparse(call.func) for call in script.calls.get("backward", ()))
