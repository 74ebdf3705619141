"""SS302 across a call: a function trains on a loss, hands it back with its graph, and the caller adds it up."""

import ast
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.hit import Hit
from steadystep.lint.names import name_of, path_of
from steadystep.lint.rules.trained import trained_losses
from steadystep.lint.script import Function, Script
from steadystep.lint.targets import target_of


def handed_back(context: Context) -> Iterator[Hit]:
    """`total += train_step(batch)`, and the same with a name in between, or with one of several."""
    script, losses = context.script, set(trained_losses(context))
    for node in script.nodes:
        if not isinstance(node, ast.AugAssign) or not isinstance(node.op, ast.Add) or not script.loops_of(node):
            continue
        value = node.value
        if (
            isinstance(value, ast.BinOp)
            and isinstance(value.op, ast.Mult | ast.Div)
            and isinstance(value.left, ast.Name)
        ):
            value = value.left  # weighed with the size of the batch
        call, index = _call(script, value, node)
        function = target_of(call, script) if call is not None else None
        total = path_of(node.target)
        if function is None or not _hands_back(script, function, index, losses) or _is_trained_on(script, total):
            continue
        diff = context.edit().replace(value, f"{ast.unparse(value)}.item()").diff()
        message = f"{total} adds up what {function.name} hands back, with its graph"
        yield hit("SS302", node, message, diff=diff)


def _call(script: Script, value: ast.expr, at: ast.AST) -> tuple[ast.Call | None, int | None]:
    """The call that a value comes from, and which of the values that it gives back."""
    if isinstance(value, ast.Call):
        return value, None
    found = script.reaching(value.id, at) if isinstance(value, ast.Name) else None
    if found is None or not isinstance(found[0], ast.Assign) or not isinstance(found[1], ast.Call):
        return None, None
    target = found[0].targets[0]
    if isinstance(target, ast.Name):
        return found[1], None
    names = [name_of(t) for t in target.elts] if isinstance(target, ast.Tuple) else []
    plain = isinstance(value, ast.Name) and value.id in names and found[1] is found[0].value
    return (found[1], names.index(value.id)) if plain and isinstance(value, ast.Name) else (None, None)


def _hands_back(
    script: Script, function: Function, index: int | None, losses: set[tuple[Function | None, str]]
) -> bool:
    """Every return is a loss that was trained on in it, as it is, and nothing cut it in between."""
    words = {n.attr for n in ast.walk(function) if isinstance(n, ast.Attribute)}
    if not {"backward", "step"} <= words:
        return False
    returns = [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and script.scope_of(n) is function]
    if index is not None:
        tuples = [r for r in returns if isinstance(r, ast.Tuple) and index < len(r.elts)]
        if len(tuples) != len(returns):
            return False
        returns = [r.elts[index] for r in tuples]
    names = [name_of(r) for r in returns]
    trained = [c.lineno for c in script.calls.get("backward", ()) if script.scope_of(c) is function]
    late = [s for n in names for s, _ in script.assigned.get((function, n), ()) if s.lineno > max(trained, default=0)]
    return bool(names) and not late and all((function, name) in losses for name in names)


def _is_trained_on(script: Script, total: str) -> bool:
    return any(total in ast.unparse(call.func) for call in script.calls.get("backward", ()))
