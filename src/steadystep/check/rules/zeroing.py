"""SS106: an optimizer whose gradients nothing clears. Clearing those of another one is no excuse."""

import ast
import re
from collections.abc import Iterator

from steadystep.check.context import Context, Cycle, hit
from steadystep.check.events import Event, meets
from steadystep.check.hit import Hit
from steadystep.check.names import last, name_of

_CLEARS = re.compile(r"(zero|reset|clear|clean)\w*grad", re.I)


def check(context: Context) -> Iterator[Hit]:
    """For every step in every loop."""
    for cycle in context.cycles:
        # why: something outside the file that takes the optimizer may clear its gradients
        if not any(e.kind in ("opaque", "guard") for e in cycle.events):
            yield from _missing(context, cycle)


def _missing(context: Context, cycle: Cycle) -> Iterator[Hit]:
    step = cycle.step
    backward = next((e for e in cycle.before(step) if e.kind == "backward" and meets(e, step)), None)
    if backward is None or (backward.managed and not only_goes_back(context, backward)):
        return
    zeros = [e for e in cycle.root if e.kind == "zero"]
    # why all of the file: a method that a framework calls may clear what this one steps on
    if zeros and (_elsewhere(context) or any(_may_clear(context, zero, step) for zero in context.events("zero"))):
        return
    if cycle.loop is None and _is_given(context, step):
        return  # the loop, and what clears the gradients, may be where this is called from
    optimizer = step.subject if step.kind == "scaler-step" else step.owner
    written = optimizer_written(step)
    made = context.roles.optimizer_call(written, step.node)
    if made is not None and cycle.loop is not None and cycle.loop.node in context.script.ancestors(made):
        return  # a new optimizer in each pass: this measures something, it does not train
    diff = ""
    if context.script.scope_of(backward.node) is context.script.scope_of(step.node):
        diff = context.edit().put_before(backward.stmt, f"{written}.zero_grad()").diff()
    message = f"{optimizer}.zero_grad() is never called"
    yield hit("SS106", backward.node, message, diff=diff, snippet=f"{written}.zero_grad()\nloss.backward()")


def only_goes_back(context: Context, backward: Event) -> bool:
    """`accelerator.backward(loss)`, `fabric.backward(loss)`, `self.manual_backward(loss)`; an engine may do more."""
    script, leaf = context.script, last(backward.local).lower()
    if isinstance(backward.node, ast.Call) and last(name_of(backward.node.func)) == "manual_backward":
        return True
    made = [v for v in script.values(backward.local, backward.node) if isinstance(v, ast.Call)]
    known = any(last(script.full(v.func)) in ("Accelerator", "Fabric") for v in made)
    return known or "accelerator" in leaf or "fabric" in leaf


def _elsewhere(context: Context) -> bool:
    """A helper of another file that clears gradients, by its name."""
    script = context.script
    return any(_CLEARS.search(name) and name != "zero_grad" and name not in script.functions for name in script.calls)


def _may_clear(context: Context, zero: Event, step: Event) -> bool:
    """Everything may, but what is known to be about another network, one that has an optimizer of its own."""
    optimizer = step.subject if step.kind == "scaler-step" else step.owner
    if not zero.local or zero.owner == optimizer:
        return True
    stepped, cleared = _networks(context, optimizer_written(step), step.node), _cleared(context, zero)
    if not stepped or not cleared:
        return True
    return any(_within(a, b) or _within(b, a) or _tied(context, a, b) for a in stepped for b in cleared)


def _within(a: str, b: str) -> bool:
    return f"{a}.".startswith(f"{b}.")


def _networks(context: Context, optimizer: str, at: ast.AST) -> list[str]:
    made = context.roles.optimizer_call(optimizer, at)
    return (context.roles.networks_of(made) or []) if made is not None else []


def _cleared(context: Context, zero: Event) -> list[str]:
    """The networks a zero_grad is about, or none when the file does not tell."""
    if context.roles.of(zero.local, zero.node) == "optimizer":
        return _networks(context, zero.local, zero.node)
    made = [c for calls in context.script.calls.values() for c in calls if context.roles.is_optimizer(c)]
    return [zero.local] if any(zero.local in (context.roles.networks_of(c) or []) for c in made) else []


def _tied(context: Context, a: str, b: str) -> bool:
    """One was made from the other, or both names stand for one thing."""
    for name, assigned in context.script.named.items():
        for _, value in assigned:
            parts = {name_of(n) for n in ast.walk(value)}
            if (name == a and b in parts) or (name == b and a in parts):
                return True
    values = [context.script.named.get(name, ()) for name in (a, b)]
    return any(x is y and not _unpacked(s) for s, x in values[0] for _, y in values[1])


def _unpacked(stmt: ast.stmt) -> bool:
    """`a, b = ...` makes two things."""
    return isinstance(stmt, ast.Assign) and any(isinstance(t, ast.Tuple | ast.List) for t in stmt.targets)


def _is_given(context: Context, step: Event) -> bool:
    scope = context.script.scope_of(step.node)
    head = optimizer_written(step).partition(".")[0]
    return scope is not None and head in [a.arg for a in scope.args.args]


def optimizer_written(step: Event) -> str:
    """The optimizer of a step, as written at the place."""
    if step.kind == "step":
        return step.local
    call = step.node
    return ast.unparse(call.args[0]) if isinstance(call, ast.Call) and call.args else "optimizer"
