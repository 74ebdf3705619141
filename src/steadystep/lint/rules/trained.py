"""The losses that are trained on: by what name, and who else in the file is given them."""

import ast
from collections.abc import Iterator

from steadystep.lint.bindings import Function, parameters
from steadystep.lint.context import Context
from steadystep.lint.names import looks_like_loss, name_of, path_of
from steadystep.lint.script import Scope, Script
from steadystep.lint.targets import target_of

_NUMBERS = ("item", "detach", "cpu", "float", "tolist", "numpy", "data")
_STEPS = ("training_step", "train_step", "compute_loss")


def cut_value(node: ast.AST) -> ast.AST:
    """`loss` of `loss.detach().item()` and of `float(loss)`."""
    while True:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _NUMBERS:
            node = node.func.value
        elif isinstance(node, ast.Call) and name_of(node.func) == "float" and len(node.args) == 1:
            node = node.args[0]
        else:
            return node


def trained_losses(context: Context) -> list[tuple[Scope, str]]:
    """(function, name) of every loss that backward is called on, or that a framework's step gives back."""
    script = context.script
    found: dict[tuple[Scope, str], None] = {}
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


def _parts(context: Context) -> Iterator[tuple[Scope, str]]:
    """What a trained loss is the sum of, where that has a name."""
    script = context.script
    for scope, name in trained_losses(context):
        for _, value in script.assigned.get((scope, name), ()):
            if isinstance(value, ast.BinOp):
                names = [n.id for n in ast.walk(value) if isinstance(n, ast.Name)]
                yield from ((scope, n) for n in names if _is_computed(context, scope, n))


def _is_computed(context: Context, scope: Scope, name: str) -> bool:
    values = [v for _, v in context.script.assigned.get((scope, name), ())]
    return bool(values) and all(isinstance(v, ast.Call | ast.BinOp) for v in values)


def goes_back(script: Script, total: str, scope: Scope) -> bool:
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
