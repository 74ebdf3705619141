"""SS401 and SS402 by the order of events: a pass that only measures, in training mode or with gradients on."""

import ast
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.hit import Hit
from steadystep.lint.networks import Network, related
from steadystep.lint.rules.callers import called_from_elsewhere, run_by_framework
from steadystep.lint.rules.evaluation_mode import (
    may_switch,
    mode_matters,
    no_grad_around,
    stays_in_eval,
    wants_gradients,
)
from steadystep.lint.rules.measured import Measured, measured


def in_order(context: Context) -> Iterator[Hit]:
    """One of each kind at most: the others have the same cause."""
    seen: set[str] = set()
    for one in measured(context):
        for found in (*_in_training_mode(context, one), *_with_graph(context, one)):
            if found.code not in seen:
                seen.add(found.code)
                yield found


def _in_training_mode(context: Context, one: Measured) -> Iterator[Hit]:
    """The last that was said is train(), and then numbers are read over held-out data."""
    script, first = context.script, one.forwards[0]
    mode = one.mode()
    if mode is None or mode.kind != "train" or not (one.twin or (one.held_out and one.quiet)):
        return
    between = one.root[one.root.index(mode) : one.root.index(first)]
    me = Network(first.local, first.node)
    others = [Network(e.local, e.node) for e in between if e.kind in ("eval", "mode")]
    if any(related(script, me, other) is not False for other in others) or not _reads_numbers(script_node(one)):
        return
    if (
        not isinstance(first.node, ast.Call)
        or not mode_matters(script, first.node)
        or stays_in_eval(script, first.node)
    ):
        return
    scope = script.scope_of(first.node)
    around: ast.AST = scope if scope is not None else one.loop.node
    if may_switch(script, around) or _switched_by_callers(context, one) or run_by_framework(script, scope):
        return
    message = f"{first.local} is evaluated in training mode: the last call was {mode.local}.train()"
    yield hit("SS401", mode.node if one.twin else one.loop.node, message, snippet=f"{mode.local}.train(training)")


def _switched_by_callers(context: Context, one: Measured) -> bool:
    """Something on the way here sets the mode in a way that is not seen."""
    return any(may_switch(context.script, context.script.stmt_of(site)) for site in one.loop.sites)


def _with_graph(context: Context, one: Measured) -> Iterator[Hit]:
    """Eval mode was set, or the same loop trains elsewhere, and nothing switches gradients off."""
    script, mode = context.script, one.mode()
    calls = [e.node for e in one.forwards]
    if any(e.no_grad or no_grad_around(script, e.node) for e in one.forwards):
        return
    in_eval = mode is not None and mode.kind == "eval" and _is_trained(context, one)
    if not in_eval and not (one.twin and (mode is None or mode.kind != "train" or one.held_out)):
        return
    scope = script.scope_of(one.loop.node)
    if wants_gradients(script, scope, one.loop.node) or any(
        wants_gradients(script, script.scope_of(c), c) for c in calls
    ):
        return
    if "autograd" in script.text and in_eval:
        return
    runs = [c for c in calls if isinstance(c, ast.Call)]
    if called_from_elsewhere(script, scope, runs, one.loop.node):
        return
    if any(no_grad_around(script, site) for site in one.loop.sites) or not _reads_numbers(scope or script_node(one)):
        return
    yield hit("SS402", one.loop.node, "evaluation without torch.no_grad()", snippet=_QUIET)


def _is_trained(context: Context, one: Measured) -> bool:
    """The network is one that train() is called on as well, so it is not a frozen one."""
    owners = {e.owner for e in context.events("train", "mode")}
    return any(f"{e.owner}.".startswith((f"{o}.", f"{o}[")) for e in one.forwards for o in owners)


def script_node(one: Measured) -> ast.AST:
    """The loop in the tree."""
    return one.loop.node


def _reads_numbers(node: ast.AST) -> bool:
    words = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
    return bool(words & {"item", "argmax", "tolist", "numpy", "topk", "indices"})


_QUIET = """with torch.no_grad():   # with a flag: torch.set_grad_enabled(training)
    for x, y in loader: ..."""
