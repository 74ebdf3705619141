"""The losses that are trained on: by what name, and who else in the file is given them."""

import ast
from collections.abc import Iterator

from steadystep.check.bindings import Function
from steadystep.check.context import Context
from steadystep.check.names import looks_like_loss, name_of
from steadystep.check.script import Scope
from steadystep.check.targets import target_of

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
    return [loss.id] if isinstance(loss, ast.Name) else []


def calls_with_loss(context: Context) -> Iterator[tuple[int, Function]]:
    """(position, function) where a trained loss, or its number, is given to a function of this file."""
    script = context.script
    losses = set(trained_losses(context))
    for calls in list(script.calls.values()):
        for call in calls:
            scope = script.scope_of(call)
            for position, given in enumerate(call.args):
                if (scope, name_of(cut_value(given))) in losses:
                    function = target_of(call, script)
                    if function is not None:
                        yield position, function
