"""SS302: a loss that is added to a total, or put in a list, together with its graph."""

import ast
from collections.abc import Iterator

from steadystep.check.context import Context, hit
from steadystep.check.events import Event
from steadystep.check.hit import Hit
from steadystep.check.names import looks_like_model, looks_like_optimizer, name_of, path_of
from steadystep.check.numbers import number
from steadystep.check.roles import is_model_call
from steadystep.check.rules.handed_back import handed_back
from steadystep.check.rules.loss import cut_at, under_no_grad
from steadystep.check.rules.meters import in_a_meter, in_training_step
from steadystep.check.rules.trained import names_in_sum
from steadystep.check.script import Scope, Script

_FEW = 20  # graphs whose buffers are freed: so many weigh nothing


def check(context: Context) -> Iterator[Hit]:
    """Both, for every loss with a name."""
    for event in context.events("backward"):
        loops = context.script.loops_of(event.node)
        if event.no_grad or not loops:
            continue
        names = names_in_sum(event.loss)
        for name in [*names, *_parts(context.script, event, names)]:
            yield from _summed(context, event, name, loops[0])
            yield from _listed(context, event, name, loops[0])
            yield from in_a_meter(context, event, name, loops[0])
        for name in _outputs(context.script, event, loops[0]):
            yield from _listed(context, event, name, loops[0])
    yield from handed_back(context)
    yield from in_training_step(context)


def _parts(script: Script, event: Event, names: list[str]) -> list[str]:
    """What the loss is the sum of, where that has a name: `ce` and `kl` of `ce + 0.1 * kl`."""
    found = [script.reaching(name, event.node) for name in names]
    sums = [value for _, value in (f for f in found if f is not None) if isinstance(value, ast.BinOp)]
    inside = [n.id for value in sums for n in ast.walk(value) if isinstance(n, ast.Name)]
    scope = script.scope_of(event.node)
    made = {n: [v for _, v in script.assigned.get((scope, n), ())] for n in inside}
    return [
        n
        for n, values in made.items()
        if n not in names
        and values
        and all(
            isinstance(v, ast.Call) and cut_at(v) is None and name_of(v.func) not in ("len", "range", "max", "min")
            for v in values
        )
    ]


def _outputs(script: Script, event: Event, loop: ast.AST) -> list[str]:
    """What the network gave in this pass, where the loss was computed from it: `out = model(x)`."""
    scope, found = script.scope_of(event.node), list[str]()
    losses = [
        v
        for n in names_in_sum(event.loss)
        for s, v in script.assigned.get((scope, n), ())
        if loop in script.ancestors(s)
    ]
    read = {n.id for value in losses for n in ast.walk(value) if isinstance(n, ast.Name)}
    for name in sorted(read):
        made = [v for s, v in script.assigned.get((scope, name), ()) if loop in script.ancestors(s)]
        if made and all(isinstance(v, ast.Call) and is_model_call(v, script) for v in made):
            found.append(name)
    return found


def _summed(context: Context, event: Event, name: str, loop: ast.AST) -> Iterator[Hit]:
    script, scope = context.script, context.script.scope_of(event.node)
    for node in ast.walk(loop):
        added = _added(node)
        if added is None or script.scope_of(node) is not scope or not isinstance(node, ast.stmt):
            continue
        total, value = added
        bare = _bare(value, name)
        if bare is None or total == name or _goes_back(script, total, scope) or under_no_grad(script, node):
            continue
        if _begun_in(script, loop, scope, total, node) or _is_cut_before(script, event, name, node):
            continue
        diff = context.edit().replace(bare, f"{name}.item()").diff()
        yield hit("SS302", node, f"{total} adds up {name} with its graph", diff=diff)


def _begun_in(script: Script, loop: ast.AST, scope: Scope, total: str, but: ast.AST) -> bool:
    """Begun anew now and then: the graphs are few."""
    return any(s is not but and loop in script.ancestors(s) for s, _ in script.assigned.get((scope, total), ()))


def _is_cut_before(script: Script, event: Event, name: str, node: ast.AST) -> bool:
    found = script.reaching(name, node)
    return found is not None and found[0].lineno > event.line and cut_at(found[1]) is not None


def _added(node: ast.AST) -> tuple[str, ast.expr] | None:
    """(total, what is added) of `total += x` and `total = total + x`."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        target = node.target.value if isinstance(node.target, ast.Subscript) else node.target
        return name_of(target), node.value
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.value, ast.BinOp):
        total = name_of(node.targets[0])  # a running mean is a total too: 0.9 * total + 0.1 * loss
        if isinstance(node.value.op, ast.Add) and total and total in {name_of(n) for n in ast.walk(node.value.left)}:
            return total, node.value.right
    return None


def _bare(node: ast.expr, name: str) -> ast.Name | None:
    """The loss itself in a sum or a product; inside a call it is somebody else's."""
    if isinstance(node, ast.Name):
        return node if node.id == name else None
    if isinstance(node, ast.BinOp):
        return _bare(node.left, name) or _bare(node.right, name)
    if isinstance(node, ast.List) and len(node.elts) == 1:
        return _bare(node.elts[0], name)
    return None


def _goes_back(script: Script, total: str, scope: Scope) -> bool:
    """Whether the total is itself trained on, directly or through other names, or detached in place."""
    waiting: list[ast.AST] = []
    for name in ("backward", "manual_backward", "detach_"):
        for call in script.calls.get(name, ()):
            if script.scope_of(call) is scope and isinstance(call.func, ast.Attribute):
                waiting += [call.func.value, *call.args]
    loops = [n for n in ast.walk(scope or script.tree) if isinstance(n, ast.For)]
    seen: set[str] = set()
    while waiting:
        for node in ast.walk(waiting.pop()):
            name = name_of(node)
            if name and name not in seen:
                seen.add(name)
                waiting += [value for _, value in script.assigned.get((scope, name), ())]
                waiting += [n.iter for n in loops if name in {name_of(t) for t in ast.walk(n.target)}]
    return total in seen


def _listed(context: Context, event: Event, name: str, loop: ast.For | ast.AsyncFor | ast.While) -> Iterator[Hit]:
    """`losses.append(loss)`, for a loss whose graph has been used up and an ordinary list that only grows.

    A loss that is collected for a joint backward is not gone back through on its own, so it never comes here.
    """
    script, scope = context.script, context.script.scope_of(event.node)
    if not _steps_in(context, event) or _over_few(script, loop) or _retains(event):
        return
    for call in script.calls.get("append", ()):
        if script.scope_of(call) is not scope or loop not in script.ancestors(call) or len(call.args) != 1:
            continue
        held = path_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        kept = _kept(call.args[0], name)
        if kept is None or not _only_grows(script, held, call, loop, scope):
            continue
        if _goes_back(script, held, scope) or under_no_grad(script, call) or _is_cut_before(script, event, name, call):
            continue
        diff = context.edit().replace(kept, f"{name}.detach()").diff()
        yield hit("SS302", script.stmt_of(call), f"{held} keeps {name} with its graph", diff=diff)


def _kept(given: ast.expr, name: str) -> ast.expr | None:
    """The loss itself, alone or as a part of a record that is written out."""
    parts = given.values if isinstance(given, ast.Dict) else given.elts if isinstance(given, ast.Tuple) else [given]
    return next((part for part in parts if name_of(part) == name), None)


def _steps_in(context: Context, event: Event) -> bool:
    """An update in every pass: a loop over the parts of one batch has few."""
    steps = context.events("step", "scaler-step")
    return any(e.inner is not None and e.inner == event.inner for e in steps)


def _over_few(script: Script, loop: ast.For | ast.AsyncFor | ast.While) -> bool:
    """A loop over networks or optimizers is a short one, and so is one of a few passes."""
    if isinstance(loop, ast.While):
        return False
    passes = loop.iter.args if isinstance(loop.iter, ast.Call) and name_of(loop.iter.func) == "range" else []
    known = number(passes[0], script, loop) if len(passes) == 1 else None
    names = [name_of(n) for part in (loop.iter, loop.target) for n in ast.walk(part)]
    return (known is not None and known <= _FEW) or any(
        looks_like_model(n) or looks_like_optimizer(n) for n in names if n
    )


def _retains(event: Event) -> bool:
    return isinstance(event.node, ast.Call) and any(k.arg == "retain_graph" for k in event.node.keywords)


def _only_grows(script: Script, held: str, call: ast.Call, loop: ast.AST, scope: Scope) -> bool:
    values = script.values(held, call)
    if not values or not all(isinstance(v, ast.List) and not v.elts for v in values):
        return False
    if _begun_in(script, loop, scope, held, call):
        return False
    for node in ast.walk(loop):
        if isinstance(node, ast.Attribute) and node.attr in ("clear", "pop") and name_of(node.value) == held:
            return False
        if isinstance(node, ast.Delete | ast.Subscript) and held in {name_of(n) for n in ast.walk(node)}:
            return isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
    return True
