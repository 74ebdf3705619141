"""The losses that are trained on: by what name, who else is given them, and what keeps them with their graph."""

import ast
from collections.abc import Iterator

from steadystep.lint.context import Context
from steadystep.lint.events import Event
from steadystep.lint.names import Function, looks_like_loss, name_of, parameters, path_of
from steadystep.lint.networks import is_model_call
from steadystep.lint.script import Script, ScriptScope
from steadystep.lint.sources import loop_values, sources
from steadystep.lint.targets import target_of

_NUMBERS = ("item", "detach", "cpu", "float", "tolist", "numpy", "data")
_STEPS = ("training_step", "train_step", "compute_loss")
_NO_LOSS = ("len", "range", "max", "min", "float", "int", "time", "perf_counter", "next", "item")


def cut_value(node: ast.AST) -> ast.AST:
    """`loss` of `loss.detach().item()` and of `float(loss)`."""
    while True:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _NUMBERS:
            node = node.func.value
        elif isinstance(node, ast.Call) and name_of(node.func) == "float" and len(node.args) == 1:
            node = node.args[0]
        else:
            return node


def trained_losses(context: Context) -> list[tuple[ScriptScope, str]]:
    """(function, name) of every loss that backward is called on, or that a framework's step gives back."""
    script = context.script
    found: dict[tuple[ScriptScope, str], None] = {}
    for event in context.events("backward"):
        for name in names_in_sum(event.loss):
            found[script.scope_of(event.node), name] = None
    for title in _STEPS:
        for function in script.functions.get(title, ()):
            for node in ast.walk(function):
                if isinstance(node, ast.Return) and isinstance(node.value, ast.Name):
                    found[function, node.value.id] = None
    return list(found)


def names_in_sum(loss: ast.AST | None) -> list[str]:
    """`loss` of `loss` and of `(loss / n)`."""
    if isinstance(loss, ast.BinOp):
        parts = [loss.left] if isinstance(loss.op, ast.Div) else [loss.left, loss.right]
        return [name for part in parts for name in names_in_sum(part) if looks_like_loss(name)]
    return [path_of(loss)] if path_of(loss) else []


def calls_with_loss(context: Context) -> Iterator[tuple[str, Function]]:
    """(parameter, function) where a trained loss, a part of it or its number is given to a function of this file."""
    script = context.script
    losses = set(trained_losses(context)) | set(_parts(context))
    for calls in list(script.calls.values()):
        for call in calls:
            scope = script.scope_of(call)
            given: list[tuple[int | str, ast.expr]] = [*enumerate(call.args)]
            given += [(k.arg, k.value) for k in call.keywords if k.arg]
            taken = [
                place for place, value in given if any((scope, path_of(cut_value(v))) in losses for v in _flat(value))
            ]
            function = target_of(call, script) if taken else None
            if function is not None:
                yield from ((name, function) for name in (_parameter(function, place) for place in taken) if name)


def _flat(value: ast.expr) -> list[ast.expr]:
    """A value, or the entries of a table that is written out."""
    if isinstance(value, ast.Dict):
        return value.values
    return value.elts if isinstance(value, ast.Tuple | ast.List) else [value]


def _parameter(function: Function, place: int | str) -> str:
    names = [p for p in parameters(function) if p not in ("self", "cls")]
    if isinstance(place, int):
        rest = function.args.vararg.arg if function.args.vararg is not None else ""
        return names[place] if place < len(names) else rest
    spread = function.args.kwarg.arg if function.args.kwarg is not None else ""
    return place if place in names else spread


def _parts(context: Context) -> Iterator[tuple[ScriptScope, str]]:
    """What a trained loss is the sum of, where that has a name."""
    script = context.script
    for scope, name in trained_losses(context):
        for _, value in script.assigned.get((scope, name), ()):
            if isinstance(value, ast.BinOp):
                names = [n.id for n in ast.walk(value) if isinstance(n, ast.Name)]
                yield from ((scope, n) for n in names if _is_computed(context, scope, n))


def _is_computed(context: Context, scope: ScriptScope, name: str) -> bool:
    values = [v for _, v in context.script.assigned.get((scope, name), ())]
    return bool(values) and all(isinstance(v, ast.Call | ast.BinOp) for v in values)


def goes_back(script: Script, total: str, scope: ScriptScope) -> bool:
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
