"""SS301: a loss that was cut from its graph before backward."""

import ast
from collections.abc import Iterator

from steadystep.lint.context import Context, hit, only_goes_back
from steadystep.lint.control import is_no_grad
from steadystep.lint.events import Event
from steadystep.lint.names import last, looks_like_loss, name_of
from steadystep.lint.networks import is_model_call
from steadystep.lint.report import Hit
from steadystep.lint.rules.cut_terms import cut_terms, other_factor, summed_cut
from steadystep.lint.rules.origins import origins, straight
from steadystep.lint.script import Script
from steadystep.lint.targets import target_of

CUTS = ("item", "detach", "tolist", "numpy")
_SAME = ("requires_grad_", "mean", "sum", "float", "to", "cuda", "squeeze")


def check(context: Context) -> Iterator[Hit]:
    """For every backward."""
    for event in context.events("backward"):
        if not event.no_grad and (not event.managed or only_goes_back(context, event)):
            yield from _cut(context, event)


def cut_at(node: ast.expr | None) -> ast.expr | None:
    """The part of an expression that leaves the graph: `loss.item()`, `loss.detach()`, `loss.data`, `float(loss)`."""
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            if node.func.attr in CUTS:
                return node
            return (
                cut_at(node.func.value) if node.func.attr in ("cpu", "float", "requires_grad_", "mean", "sum") else None
            )
        if name_of(node.func) in ("float", "int") and node.args:
            return node
    if isinstance(node, ast.Attribute) and node.attr == "data":
        return node
    return None


def _cut(context: Context, event: Event) -> Iterator[Hit]:
    script, loss = context.script, event.loss
    if isinstance(event.node, ast.Call) and event.node.args and not event.managed:
        return
    loss = _inside_tensor(script, _bare(loss))
    cut, place = cut_at(loss), event.node
    if cut is None and loss is not None and _is_a_loss(loss):
        place, cut = _where_it_was_cut(script, event, loss)
    if cut is None:
        place, cut = event.node, _new_leaf(script, event.loss)
    if cut is None and event.loss is not None:
        cut = next(cut_terms(script, event.loss, event.node), None)
        place = cut if cut is not None else place
    if cut is None:
        return
    diff = ""
    if isinstance(cut, ast.Call) and isinstance(cut.func, ast.Attribute) and cut.func.attr in CUTS:
        edit, leaf = context.edit().replace(cut, ast.unparse(cut.func.value)), _new_leaf(script, event.loss)
        if isinstance(leaf, ast.Call):
            edit.replace(leaf, ast.unparse(leaf.args[0]))
        diff = edit.diff()
    message = f"{_short(cut)} takes the loss out of the graph, and backward() is called on what is left"
    yield hit(
        "SS301", place, message, diff=diff, snippet="loss.backward()\nrunning += loss.item()   # for the log only"
    )


def _bare(loss: ast.expr | None) -> ast.expr | None:
    """`loss` of `loss.requires_grad_()`, of `loss.mean()` and of `(loss / n)`."""
    while True:
        if isinstance(loss, ast.BinOp) and isinstance(loss.op, ast.Div):
            loss = loss.left
        elif isinstance(loss, ast.BinOp) and isinstance(loss.op, ast.Mult) and other_factor(loss) is not None:
            loss = other_factor(loss)
        elif isinstance(loss, ast.Call) and isinstance(loss.func, ast.Attribute) and loss.func.attr in _SAME:
            loss = loss.func.value
        else:
            return loss


def _is_a_loss(loss: ast.expr) -> bool:
    """By its name, by the key it has in a table, or by the function it comes from."""
    match loss:
        case ast.Subscript(slice=ast.Constant(value=str() as key)):
            return looks_like_loss(key) or key in ("total", "sum", "all")
        case ast.Subscript(slice=ast.Constant(value=int())) | ast.Call():
            return isinstance(loss, ast.Subscript) or looks_like_loss(name_of(loss.func))
    return bool(name_of(loss)) and looks_like_loss(name_of(loss))


def _where_it_was_cut(script: Script, event: Event, loss: ast.expr) -> tuple[ast.AST, ast.expr | None]:
    found = script.reaching(loss.id, event.node) if isinstance(loss, ast.Name) else None
    if found is None or not straight(script, found[0], event.stmt):
        found = (event.stmt, loss)
    cut = _new_leaf(script, _bare(found[1])) or cut_at(_inside_tensor(script, found[1])) or summed_cut(script, found[1])
    if cut is not None:
        return found[0], cut
    ways = [] if _goes_back_inside(script, found[1]) else origins(script, loss, event.node)
    bare = [(stmt, inner) for stmt, inner in ((stmt, _bare(value)) for stmt, value in ways) if inner is not None]
    ways = [way for stmt, inner in bare for way in origins(script, inner, stmt) or [(stmt, inner)]]
    cuts = [(stmt, _cut_somehow(script, value)) for stmt, value in ways]
    if cuts and all(c is not None for _, c in cuts):
        return cuts[0]
    return _cut_output(script, *found) or (found[0], None)


def _cut_somehow(script: Script, value: ast.expr) -> ast.expr | None:
    return cut_at(_inside_tensor(script, value)) or _new_leaf(script, value) or summed_cut(script, value)


def _goes_back_inside(script: Script, value: ast.expr) -> bool:
    """The function that gives the loss has trained on it, and gives a number for the log."""
    calls = [n for n in ast.walk(value) if isinstance(n, ast.Call)]
    functions = [f for f in (target_of(c, script) for c in calls) if f is not None]
    return any(isinstance(n, ast.Attribute) and n.attr == "backward" for f in functions for n in ast.walk(f))


def _cut_output(script: Script, stmt: ast.stmt, value: ast.expr) -> tuple[ast.stmt, ast.expr] | None:
    """`loss = criterion(out, y)` with an `out` of the only network there is, cut or made without gradients."""
    if not isinstance(value, ast.Call) or is_model_call(value, script) or not value.args:
        return None
    known = looks_like_loss(last(script.full(value.func))) or "criterion" in name_of(value.func)
    out = value.args[0]
    known = known or last(script.full(value.func)).endswith("cross_entropy")
    if (
        not known
        or not isinstance(out, ast.Name)
        or any(isinstance(n, ast.Call) for a in value.args[1:] for n in ast.walk(a))
    ):
        return None
    found = script.reaching(out.id, stmt)
    if found is None or not isinstance(found[0], ast.Assign) or name_of(found[0].targets[0]) != out.id:
        return None
    made, cut = found[1], cut_at(found[1])
    inner = cut.func.value if isinstance(cut, ast.Call) and isinstance(cut.func, ast.Attribute) else made
    if not isinstance(inner, ast.Call) or not is_model_call(inner, script) or _others_run(script, stmt, inner):
        return None
    if cut is None and not under_no_grad(script, inner, surely=True):
        return None
    return found[0], cut or made


def _others_run(script: Script, stmt: ast.stmt, but: ast.Call) -> bool:
    """Another network, or this one again, runs in the same loop: the gradient may come from there."""
    loops = script.loops_of(stmt)
    body: ast.AST = loops[0] if loops else (script.scope_of(stmt) or script.tree)
    runs = [n for n in ast.walk(body) if isinstance(n, ast.Call) and n is not but and is_model_call(n, script)]
    return bool(runs) or any(
        isinstance(n, ast.Attribute)
        and n.attr in ("requires_grad", "grad", "parameters", "weight")
        and not (n.attr == "requires_grad" and looks_like_loss(name_of(n.value)))
        and not (n.attr == "parameters" and _is_clipped(script, n))
        for n in ast.walk(body)
    )


def _is_clipped(script: Script, node: ast.Attribute) -> bool:
    """`clip_grad_norm_(model.parameters(), 1.0)` has nothing to do with the loss."""
    outer = script.parents.get(script.parents.get(node, node))
    return isinstance(outer, ast.Call) and "clip_grad" in ast.unparse(outer.func)


def _new_leaf(script: Script, value: ast.expr | None) -> ast.expr | None:
    """`torch.tensor(total, requires_grad=True)`: whatever went in, nothing goes back through it."""
    if not isinstance(value, ast.Call) or script.full(value.func) not in ("torch.tensor", "torch.as_tensor"):
        return None
    asked = any(k.arg == "requires_grad" and getattr(k.value, "value", None) is True for k in value.keywords)
    return value if asked and value.args and not isinstance(value.args[0], ast.Constant) else None


def _inside_tensor(script: Script, loss: ast.expr | None) -> ast.expr | None:
    """`torch.tensor(loss, requires_grad=True)` is a new leaf made from a number."""
    if isinstance(loss, ast.Call) and script.full(loss.func) in (
        "torch.tensor",
        "torch.Tensor",
        "torch.autograd.Variable",
    ):
        return loss.args[0] if loss.args else None
    return loss


def _short(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 40 else "..." + text[-30:]


def under_no_grad(script: Script, node: ast.AST, *, surely: bool = False) -> bool:
    """Whether a `with torch.no_grad()` is around a node; `set_grad_enabled(training)` is one that may be on."""
    withs = [a for a in script.ancestors(node) if isinstance(a, ast.With)]
    managers = [item.context_expr for w in withs for item in w.items]
    return any(is_no_grad(m) and not (surely and _may_be_on(m)) for m in managers)


def _may_be_on(manager: ast.expr) -> bool:
    given = [*manager.args, *(k.value for k in manager.keywords)] if isinstance(manager, ast.Call) else []
    return bool(given) and not (isinstance(given[0], ast.Constant) and given[0].value is False)
