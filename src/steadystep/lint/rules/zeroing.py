"""SS106: an optimizer whose gradients nothing clears. Clearing those of another one is no excuse."""

import ast
import re
from collections.abc import Iterator

from steadystep.lint.context import Context, Cycle, hit, only_goes_back
from steadystep.lint.events import Event, meets
from steadystep.lint.names import argument, last, name_of
from steadystep.lint.networks import Network, related
from steadystep.lint.report import Hit
from steadystep.lint.rules.other_network import unrelated
from steadystep.lint.script import Script
from steadystep.lint.sources import sources

_LOOSE = ("zeros", "ones", "tensor", "full", "Parameter", "randn", "rand")
_CLEARS = re.compile(r"(zero|reset|clear|clean)\w*grad", re.I)


def rescales_gradients(script: Script) -> bool:
    """Whether gradients are divided or multiplied by hand."""
    return script.once("rescales", lambda: _rescales(script))


def _rescales(script: Script) -> bool:
    for node in script.nodes:
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute) and node.target.attr == "grad":
            return True
    for name in ("div_", "mul_", "multiply_grads"):
        if any("grad" in ast.unparse(call.func) for call in script.calls.get(name, ())):
            return True
    return False


def check(context: Context) -> Iterator[Hit]:
    """For every step in every loop."""
    for cycle in context.cycles:
        # why: something outside the file that takes the optimizer may clear its gradients
        if not cycle.leaves_the_file:
            yield from _missing(context, cycle)


def _missing(context: Context, cycle: Cycle) -> Iterator[Hit]:
    step = cycle.step
    backward = next((e for e in cycle.before(step) if e.kind == "backward" and meets(e, step)), None)
    if backward is None or (backward.managed and not only_goes_back(context, backward)):
        return
    zeros = [e for e in cycle.root if e.kind == "zero"]
    # why all of the file: a method that a framework calls may clear what this one steps on
    clearing = [zero for zero in context.events("zero") if _may_clear(context, zero, step)]
    if _elsewhere(context) or (zeros and clearing and not _all_outside(context, cycle, clearing)):
        return
    if cycle.loop is None and _is_given(context, step):
        return  # the loop, and what clears the gradients, may be where this is called from
    if cycle.loop is None and _is_the_only_one(context, cycle):
        return
    optimizer = step.subject if step.kind == "scaler-step" else step.owner
    written = optimizer_written(step)
    made = context.roles.optimizer_call(written, step.node)
    if made is not None and cycle.loop is not None and cycle.loop.node in context.script.ancestors(made):
        return  # a new optimizer in each pass: this measures something, it does not train
    if any(True for _ in unrelated(context, cycle)):
        return  # SS604: this optimizer has the wrong network, and clearing it would not help
    diff = ""
    if context.script.scope_of(backward.node) is context.script.scope_of(step.node):
        diff = context.edit().put_before(backward.stmt, f"{written}.zero_grad()").diff()
    message = f"{optimizer}.zero_grad() is never called"
    if clearing:
        message = f"{optimizer}.zero_grad() is called outside the loop that steps, so gradients accumulate in it"
    yield hit("SS106", backward.node, message, diff=diff, snippet=f"{written}.zero_grad()\nloss.backward()")


def _all_outside(context: Context, cycle: Cycle, clearing: list[Event]) -> bool:
    """Every one that may clear is in this walk, but not in the loop around backward and step."""
    loop, step, script = cycle.loop, cycle.step, context.script
    if loop is None or step.last_round or rescales_gradients(script) or _leaves(loop.body):
        return False
    targets = getattr(loop.node, "target", None)
    heads = {n.id for n in ast.walk(targets) if isinstance(n, ast.Name)} if targets is not None else set()
    if step.owner.partition(".")[0] in heads or step.local.partition(".")[0] in heads:
        return False  # another optimizer in each pass
    return all(zero in cycle.root and loop not in zero.loops for zero in clearing)


def _leaves(body: list[ast.stmt]) -> bool:
    """The loop is left at the end of its first pass, perhaps after a try."""
    ends = [stmt.body[-1] if isinstance(stmt, ast.Try | ast.With) else stmt for stmt in body[-1:]]
    return any(isinstance(stmt, ast.Break | ast.Return | ast.Raise) for stmt in (*ends, *body))


def _elsewhere(context: Context) -> bool:
    """A helper of another file that clears gradients, by its name: `zero_grad(params)` is one, a method is not."""
    script = context.script
    plain = any(isinstance(c.func, ast.Name) for c in script.calls.get("zero_grad", ()))
    words = [name for name in script.calls if _CLEARS.search(name) and (name != "zero_grad" or plain)]
    return any(name not in script.functions for name in words)


def _may_clear(context: Context, zero: Event, step: Event) -> bool:
    """Everything may, but what is known to be about another network, one that has an optimizer of its own."""
    optimizer = step.subject if step.kind == "scaler-step" else step.owner
    if not zero.local or zero.owner == optimizer or zero.local == optimizer_written(step):
        return True
    if optimizer.startswith(f"{zero.owner}.") or zero.owner.startswith(f"{optimizer}."):
        return True  # a wrapper clears what it holds
    stepped, cleared = context.stepped(step), _cleared(context, zero)
    if stepped and _is_of_loose_numbers(context, zero):
        return False
    if not stepped or not cleared:
        return True
    pairs = [(a, b) for a in stepped for b in cleared]
    return any(related(context.script, a, b) is not False for a, b in pairs)


def _is_of_loose_numbers(context: Context, zero: Event) -> bool:
    """`Adam([log_alpha])`: parameters that belong to no network."""
    made = context.roles.optimizer_call(zero.local, zero.node)
    params = argument(made, 0, "params") if made is not None else None
    listed = params.elts if isinstance(params, ast.List) else []
    values = [v for p in listed for v, _ in sources(context.script, p)]
    return bool(values) and all(
        isinstance(v, ast.Call) and context.script.full(v.func).startswith("torch.") and last(name_of(v.func)) in _LOOSE
        for v in values
    )


def _cleared(context: Context, zero: Event) -> list[Network]:
    """The networks a zero_grad is about, or none when the file does not tell."""
    if context.roles.of(zero.local, zero.node) == "optimizer":
        return context.held(zero.local, zero.owner, zero) or []
    return [Network(zero.local, zero.node)]


def _is_given(context: Context, step: Event) -> bool:
    scope, written = context.script.scope_of(step.node), optimizer_written(step)
    head = written.partition(".")[0]
    if scope is None or head not in [a.arg for a in scope.args.args]:
        return False
    return head not in ("self", "cls") or not _is_own(context, step, written)


def _is_own(context: Context, step: Event, written: str) -> bool:
    """The optimizer of an object that makes it itself, and whose method goes back and steps whenever it is called."""
    script, owner = context.script, context.script.class_of(step.node)
    if owner is None or context.roles.optimizer_call(written, step.node) is None or script.loops_of(step.node):
        return False
    known = [b for b in owner.bases if last(name_of(b)) in ("object", "ABC", "Module")]
    return len(known) == len(owner.bases) and not any(
        isinstance(n, ast.Attribute) and n.attr == "zero_grad" for n in script.nodes
    )


def _is_the_only_one(context: Context, cycle: Cycle) -> bool:
    """A new optimizer and one backward before its only step: there is nothing yet to clear."""
    scope, written = context.script.scope_of(cycle.step.node), optimizer_written(cycle.step)
    made = [stmt.lineno for stmt, _ in context.script.assigned.get((scope, written), ())]
    if not made:
        return False
    backwards = [e for e in cycle.root if e.kind == "backward" and (e.loops or e.line > min(made))]
    steps = [e for e in cycle.root if e.kind in ("step", "scaler-step") and optimizer_written(e) == written]
    return len(steps) == 1 and len(backwards) == 1 and not backwards[0].loops


def optimizer_written(step: Event) -> str:
    """The optimizer of a step, as written at the place."""
    if step.kind == "step":
        return step.local
    call = step.node
    return ast.unparse(call.args[0]) if isinstance(call, ast.Call) and call.args else "optimizer"
