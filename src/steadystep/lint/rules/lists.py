"""SS302 in a list or a table: `losses.append(loss)` of a loss whose graph has been used up."""

import ast
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.events import Event
from steadystep.lint.hit import Hit
from steadystep.lint.names import looks_like_model, looks_like_optimizer, name_of, path_of
from steadystep.lint.numbers import number
from steadystep.lint.rules.kept_losses import is_loss
from steadystep.lint.rules.loss import cut_at, under_no_grad
from steadystep.lint.rules.trained import goes_back
from steadystep.lint.script import Scope, Script

_FEW = 20  # graphs whose buffers are freed: so many weigh nothing


def listed(context: Context, event: Event, names: list[str], loop: ast.For | ast.AsyncFor | ast.While) -> Iterator[Hit]:
    """For an ordinary list that only grows.

    A loss that is collected for a joint backward is not gone back through on its own, so it never comes here.
    """
    script, scope = context.script, context.script.scope_of(event.node)
    if not _steps_in(context, event) or _over_few(script, loop) or _retains(event):
        return
    for call in script.calls.get("append", ()):
        if script.scope_of(call) is not scope or loop not in script.ancestors(call) or len(call.args) != 1:
            continue
        held = held_by(call)
        kept = _kept(script, call.args[0], names)
        if kept is None or not _only_grows(script, held, call, loop, scope):
            continue
        if goes_back(script, held, scope) or under_no_grad(script, call) or _is_cut(script, event, kept, call):
            continue
        name = path_of(kept)
        diff = context.edit().replace(kept, f"{name}.detach()").diff()
        yield hit("SS302", script.stmt_of(call), f"{held} keeps {name} with its graph", diff=diff)


def held_by(call: ast.Call) -> str:
    """The list of `losses.append(x)`, of `history[k].append(x)` and of `history.setdefault(k, []).append(x)`."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    if isinstance(owner, ast.Call) and isinstance(owner.func, ast.Attribute) and owner.func.attr == "setdefault":
        owner = owner.func.value
    if isinstance(owner, ast.Subscript) and not path_of(owner):
        owner = owner.value
    return path_of(owner)


def grows(script: Script, value: ast.expr) -> bool:
    """An empty list, or a table of such."""
    if isinstance(value, ast.List):
        return not value.elts
    if isinstance(value, ast.Dict):
        return all(grows(script, v) for v in value.values)
    if isinstance(value, ast.DictComp):
        return grows(script, value.value)
    made = name_of(value.func) if isinstance(value, ast.Call) else ""
    return isinstance(value, ast.Call) and (
        (made.endswith("defaultdict") and [name_of(a) for a in value.args] == ["list"])
        or (made in ("list", "dict") and not value.args)
    )


def _is_cut(script: Script, event: Event, kept: ast.expr, node: ast.AST) -> bool:
    found = script.reaching(path_of(kept), node)
    return found is not None and found[0].lineno > event.line and cut_at(found[1]) is not None


def _kept(script: Script, given: ast.expr, names: list[str]) -> ast.expr | None:
    """The loss itself, alone or as a part of a record that is written out."""
    parts = given.values if isinstance(given, ast.Dict) else given.elts if isinstance(given, ast.Tuple) else [given]
    return next((part for part in parts if is_loss(script, part, names)), None)


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
    if not values or not all(grows(script, v) for v in values):
        return False
    if any(loop in script.ancestors(s) for s, _ in script.assigned.get((scope, held), ())):
        return False
    for node in ast.walk(loop):
        if isinstance(node, ast.Attribute) and node.attr in ("clear", "pop") and name_of(node.value) == held:
            return False
        if isinstance(node, ast.Delete) and held in {name_of(n) for n in ast.walk(node)}:
            return False
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and name_of(node.value) == held:
            return False
    return True
