"""The names under which a trained loss, or a part of it, may be kept with its graph."""

import ast

from steadystep.lint.elements import loop_values
from steadystep.lint.events import Event
from steadystep.lint.modules import is_model_call
from steadystep.lint.names import path_of
from steadystep.lint.rules.trained import names_in_sum
from steadystep.lint.script import Script
from steadystep.lint.sources import sources

_NO_LOSS = ("len", "range", "max", "min", "float", "int", "time", "perf_counter", "next", "item")


def loss_names(script: Script, event: Event) -> list[str]:
    """Of what backward is called on, and of what that is the sum of: `ce` and `kl` of `ce + 0.1 * kl`."""
    names = names_in_sum(event.loss)
    found = [script.reaching(name, event.node) for name in names]
    sums: list[ast.AST] = [value for _, value in (f for f in found if f is not None) if isinstance(value, ast.BinOp)]
    sums += [event.loss] if isinstance(event.loss, ast.BinOp) else []
    inside = [n.id for value in sums for n in ast.walk(value) if isinstance(n, ast.Name)]
    scope = script.scope_of(event.node)
    made = {n: [v for _, v in script.assigned.get((scope, n), ())] for n in inside}
    return [*names, *(n for n, values in made.items() if n not in names and values and all(map(_is_made, values)))]


def _is_made(value: ast.expr) -> bool:
    """Computed by a call that is no number and no cut."""
    if not isinstance(value, ast.Call):
        return False
    leaf = value.func.attr if isinstance(value.func, ast.Attribute) else path_of(value.func)
    return leaf not in (*_NO_LOSS, "detach", "tolist", "numpy")


def outputs(script: Script, event: Event, loop: ast.AST) -> list[str]:
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


def is_loss(script: Script, node: ast.expr, names: list[str]) -> bool:
    """One of these names, or the variable of a short loop over a table that has one of them in it."""
    if path_of(node) in names:
        return True
    if not isinstance(node, ast.Name):
        return False
    listed = loop_values(script, node.id, node, lambda e: sources(script, e)) or []
    return any(path_of(value) in names for value, _ in listed)


def bare(script: Script, node: ast.expr, names: list[str]) -> ast.expr | None:
    """The loss itself in a sum or a product; inside a call it is somebody else's."""
    if isinstance(node, ast.BinOp):
        return bare(script, node.left, names) or bare(script, node.right, names)
    if isinstance(node, ast.IfExp):
        return bare(script, node.body, names) or bare(script, node.orelse, names)
    if isinstance(node, ast.List) and len(node.elts) == 1:
        return bare(script, node.elts[0], names)
    return node if is_loss(script, node, names) else None
