"""SS302: a loss that is added to a total together with its graph; lists and meters are next door."""

import ast
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.events import Event
from steadystep.lint.hit import Hit
from steadystep.lint.names import name_of, path_of
from steadystep.lint.rules.handed_back import handed_back
from steadystep.lint.rules.kept_by_methods import in_a_method, in_training_step
from steadystep.lint.rules.kept_losses import bare, loss_names, outputs
from steadystep.lint.rules.lists import listed
from steadystep.lint.rules.loss import cut_at, under_no_grad
from steadystep.lint.rules.meters import in_a_meter
from steadystep.lint.rules.trained import goes_back
from steadystep.lint.script import Scope, Script


def check(context: Context) -> Iterator[Hit]:
    """For every loss with a name."""
    for event in context.events("backward"):
        loops = context.script.loops_of(event.node)
        if event.no_grad:
            continue
        names = loss_names(context.script, event)
        if not loops:
            yield from in_a_method(context, event, names)
            continue
        if names:
            yield from _summed(context, event, names, loops[0])
            yield from listed(context, event, names, loops[0])
            yield from in_a_meter(context, event, names, loops[0])
        given = outputs(context.script, event, loops[0])
        if given:
            yield from listed(context, event, given, loops[0])
    yield from handed_back(context)
    yield from in_training_step(context)


def _summed(context: Context, event: Event, names: list[str], loop: ast.AST) -> Iterator[Hit]:
    script, scope = context.script, context.script.scope_of(event.node)
    for node in ast.walk(loop):
        added = added_to(node)
        if added is None or script.scope_of(node) is not scope or not isinstance(node, ast.stmt):
            continue
        total, value = added
        found = bare(script, value, names)
        if found is None or total in names or goes_back(script, total, scope) or under_no_grad(script, node):
            continue
        name = path_of(found)
        if begun_in(script, loop, scope, total, node) or is_cut_before(script, event, name, node):
            continue
        if _is_for_one_update(context, loop, scope, total, node):
            continue
        diff = context.edit().replace(found, f"{ast.unparse(found)}.item()").diff()
        yield hit("SS302", node, f"{total} adds up {name} with its graph", diff=diff, snippet=f"{name}.item()")


def _is_for_one_update(context: Context, loop: ast.AST, scope: Scope, total: str, node: ast.stmt) -> bool:
    """Begun right before a loop over the parts of one update, whose step comes after it: few graphs, soon gone."""
    script = context.script
    counted = isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call) and name_of(loop.iter.func) == "range"
    if not counted or "." in total:
        return False
    block = script.parents.get(loop)
    steps = [e.node for e in context.events("step", "scaler-step") if script.scope_of(e.node) is scope]
    after = [s for s in steps if loop not in script.ancestors(s) and getattr(s, "lineno", 0) > node.lineno]
    beside = [s for s in after if block is scope or block in set(script.ancestors(s))]
    begun = [s for s, _ in script.assigned.get((scope, total), ()) if s is not node]
    inside = any(loop in script.ancestors(s) for s in steps)
    return bool(beside) and not inside and bool(begun) and all(script.parents.get(s) is block for s in begun)


def begun_in(script: Script, loop: ast.AST, scope: Scope, total: str, but: ast.AST) -> bool:
    """Begun anew now and then: the graphs are few."""
    return any(s is not but and loop in script.ancestors(s) for s, _ in script.assigned.get((scope, total), ()))


def is_cut_before(script: Script, event: Event, name: str, node: ast.AST) -> bool:
    """Between backward and here the name was given to a number."""
    found = script.reaching(name, node)
    return found is not None and found[0].lineno > event.line and cut_at(found[1]) is not None


def added_to(node: ast.AST) -> tuple[str, ast.expr] | None:
    """(total, what is added) of `total += x`, of `total = total + x`, and of the same after an `if total is None`."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        target = node.target.value if isinstance(node.target, ast.Subscript) else node.target
        return name_of(target), node.value
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return None
    target, value = node.targets[0], node.value
    total = path_of(target) or (name_of(target.value) if isinstance(target, ast.Subscript) else "")
    ways = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
    for way in ways:  # a running mean is a total too: 0.9 * total + 0.1 * loss
        if not isinstance(way, ast.BinOp) or not isinstance(way.op, ast.Add) or not total:
            continue
        for own, other in ((way.left, way.right), (way.right, way.left)):
            if ast.dump(target).replace("Store", "Load") in {ast.dump(n) for n in ast.walk(own)}:
                return total, other
    return None
