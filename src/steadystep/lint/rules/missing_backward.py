"""SS108: a step on gradients that this batch did not compute."""

import ast
import re
from collections.abc import Iterator, Sequence

from steadystep.lint.context import Context, Cycle, can_move, hit, source_of
from steadystep.lint.events import Event, implied, meets
from steadystep.lint.names import looks_like_loss, name_of, parameters
from steadystep.lint.report import Hit
from steadystep.lint.rules.loss import cut_at
from steadystep.lint.rules.stepping import clears, step_name
from steadystep.lint.targets import target_of

_MAY_GO_BACK = re.compile(
    r"backward|backprop|learn(?!ing_?rate|er|able)|closure|deriv|optimi[sz]e(?!r)|(apply|compute|calc|set|write|accumulate|estimate|get)_?\w*grad",
    re.I,
)
_USES = ("backward", "grad-call", "opaque", "guard", "step", "scaler-step")
_ONLY_LOOKS = (
    "print",
    "append",
    "extend",
    "log",
    "update",
    "add_scalar",
    "write",
    "info",
    "debug",
    "isfinite",
    "push",
    "add",
    "scale",
)


def check(context: Context) -> Iterator[Hit]:
    """For every step in every loop."""
    for cycle in context.cycles:
        if not cycle.leaves_the_file:
            yield from _no_backward(context, cycle)


def _no_backward(context: Context, cycle: Cycle) -> Iterator[Hit]:
    step = cycle.step
    if any(found(context, cycle) for found in (_nothing_between, _none_at_all, _none_in_this_loop, _loss_unused)):
        snippet = f"loss.backward()\n{step_name(step)}"
        yield hit("SS108", step.node, f"{step_name(step)} without a backward() before it", snippet=snippet)
        return
    cleared = next((e for e in cycle.before(step) if e.kind in ("zero", "backward") and meets(e, step)), None)
    if cleared is None or cleared.kind == "backward" or not clears(context, cleared, step):
        return
    if any(e.kind in ("grad-call", "step", "scaler-step") for e in cycle.before(step)):
        return
    if any(e.kind == "backward" for e in cycle.before(cleared)):
        return
    late = next((e for e in cycle.after(step) if e.kind == "backward"), None)
    if late is not None and late.inner == step.inner and meets(late, step):
        diff = ""
        if can_move(late.stmt, step.stmt, context.script):
            moved = source_of(late.stmt, context.script)
            diff = context.edit().remove(late.stmt).put_before(step.stmt, *moved).diff()
        yield hit("SS108", step.node, f"{step_name(step)} comes before backward()", diff=diff)
    elif (
        late is None
        and not context.mentions("inspect")
        and not _may_go_back(context, context.script.tree.body)
        and _has_loss(context, step)
    ):
        yield hit(
            "SS108",
            step.node,
            f"{step_name(step)} without any backward()",
            snippet="loss.backward()\n" + step_name(step),
        )


def _nothing_between(context: Context, cycle: Cycle) -> bool:
    """Cleared and then stepped, a loss computed there, and no call between the two that may go back."""
    script, step = context.script, cycle.step
    if _has_closure(step):
        return False
    cleared = next((e for e in cycle.before(step) if e.kind == "zero" and e.owner and clears(context, e, step)), None)
    if cleared is None or cleared.inner != step.inner or not implied(cleared, step) or not _has_loss(context, step):
        return False
    earlier = next((e for e in cycle.before(cleared) if e.kind in ("backward", "step", "scaler-step")), None)
    if earlier is not None and earlier.kind == "backward":
        return False  # gone back, and then cleared: SS107
    events = set(cycle.events[cycle.events.index(cleared) + 1 : cycle.events.index(step)])
    if any(e.kind in _USES for e in events):
        return False
    block = getattr(script.parents.get(step.stmt), "body", [])
    if cleared.stmt not in block or step.stmt not in block:
        scopes = {script.scope_of(cleared.node), script.scope_of(step.node)}
        bodies = [f.body if f is not None else _body(context, cycle) for f in scopes]
        return not any(_may_go_back(context, body) for body in bodies)
    between = block[block.index(cleared.stmt) + 1 : block.index(step.stmt)]
    above = block[: block.index(step.stmt)]
    losses = [n for s in above for n in ast.walk(s) if isinstance(n, ast.Assign) and _names_a_loss(n)]
    return bool(losses) and not _may_go_back(context, between)


def _has_closure(step: Event) -> bool:
    """The step is given a function, which goes back."""
    return isinstance(step.node, ast.Call) and len(step.node.args) > (step.kind == "scaler-step")


def _none_in_this_loop(context: Context, cycle: Cycle) -> bool:
    """Stepped and cleared in a loop with a loss of its own, while only another loop goes back."""
    step, loop = cycle.step, cycle.step.inner
    if loop is None or loop is cycle.loop or not loop.body or _has_closure(step):
        return False
    inside = [e for e in cycle.root if loop in e.loops]
    if any(e.kind in ("backward", "grad-call", "opaque", "guard") for e in inside):
        return False
    cleared = any(e.kind == "zero" and clears(context, e, step) for e in inside)
    named = any(isinstance(n, ast.Assign) and _names_a_loss(n) for n in ast.walk(loop.node))
    return cleared and named and not _may_go_back(context, loop.body)


def _loss_unused(context: Context, cycle: Cycle) -> bool:
    """Two steps in one block, the second after a loss of its own that nothing goes back through."""
    script, step = context.script, cycle.step
    block = getattr(script.parents.get(step.stmt), "body", [])
    before = [e for e in cycle.before(step) if e.kind in _USES]
    if not before or before[0].kind not in ("step", "scaler-step") or before[0].stmt not in block or _has_closure(step):
        return False
    if before[0].owner == step.owner or before[0].inner != step.inner or step.stmt not in block:
        return False
    between = block[block.index(before[0].stmt) + 1 : block.index(step.stmt)]
    made = [s for s in between if isinstance(s, ast.Assign) and _names_a_loss(s) and cut_at(s.value) is None]
    losses = {
        name_of(t) for s in made if isinstance(s.value, ast.Call | ast.UnaryOp | ast.BinOp) for t in s.targets
    } - {""}
    used = {name_of(n) for e in context.events("backward") if e.loss is not None for n in ast.walk(e.loss)}
    scope = script.scope_of(step.node)
    for name in [n for n in losses | used if n]:
        used |= (
            {name_of(n) for _, v in script.assigned.get((scope, name), ()) for n in ast.walk(v)}
            if name in used
            else set()
        )
    return bool(losses) and not losses & used and not _may_go_back(context, between)


def _names_a_loss(stmt: ast.Assign) -> bool:
    return any(looks_like_loss(name_of(n)) for t in stmt.targets for n in ast.walk(t) if name_of(n))


def _none_at_all(context: Context, cycle: Cycle) -> bool:
    """Cleared after the step, and nothing in the file goes back or may."""
    step = cycle.step
    if _has_closure(step):
        return False
    cleared = any(e.kind == "zero" and (e.owner or clears(context, e, step)) for e in cycle.events)
    if cycle.loop is None or not cleared or "backward" in context.script.attributes:
        return False
    if _may_go_back(context, _body(context, cycle)):
        return False
    here = any(isinstance(n, ast.Assign) and _names_a_loss(n) for n in ast.walk(cycle.loop.node))
    here = here or _has_loss(context, step)
    return here and not any(e.kind in ("backward", "grad-call") for e in context.events("backward", "grad-call"))


def _body(context: Context, cycle: Cycle) -> Sequence[ast.stmt]:
    return cycle.loop.body if cycle.loop is not None else context.script.tree.body


def _may_go_back(context: Context, block: Sequence[ast.stmt]) -> bool:
    """A call whose name says so, one that is given the loss and nothing is kept of, or gradients written by hand."""
    script = context.script
    if any(isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and n.attr == "grad" for n in script.nodes):
        return True
    if any(_MAY_GO_BACK.search(word) for word in script.calls if word not in {"backward", *script.functions}):
        return True
    for call in (n for s in block for n in ast.walk(s) if isinstance(n, ast.Call)):
        leaf = call.func.attr if isinstance(call.func, ast.Attribute) else name_of(call.func)
        given = any(looks_like_loss(name_of(a)) for a in call.args if name_of(a))
        alone = isinstance(script.parents.get(call), ast.Expr)
        if given and alone and leaf not in _ONLY_LOOKS and target_of(call, script) is None:
            return True
    return False


def _has_loss(context: Context, step: Event) -> bool:
    scope = context.script.scope_of(step.node)
    given = parameters(scope) if scope is not None else []
    return any(map(looks_like_loss, given)) or any(
        s is scope and looks_like_loss(name) for s, name in context.script.assigned
    )
