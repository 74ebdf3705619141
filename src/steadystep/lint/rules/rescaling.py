"""Gradients that are changed by hand."""

import ast

from steadystep.lint.script import Script


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
