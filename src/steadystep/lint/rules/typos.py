"""SS606: `p.require_grad = False` sets an attribute that nothing reads."""

import ast
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.names import name_of
from steadystep.lint.report import Hit
from steadystep.lint.script import Script

_TYPOS = ("require_grad", "require_grads", "requires_grads", "requre_grad", "required_grad", "requires_gard")
_PLAIN_TENSORS = frozenset(
    f"torch.{f}" for f in ("zeros", "ones", "empty", "full", "rand", "randn", "arange", "tensor")
)
_METHODS = ("requires_grad_", "require_grad_")


def check(context: Context) -> Iterator[Hit]:
    """Assignments, comparisons that were meant as one, and keywords of torch's functions."""
    script = context.script
    for node in script.nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from _stored(context, node)
        elif isinstance(node, ast.Expr) and _is_compared(node.value):
            assert isinstance(node.value, ast.Compare)
            written = f"{ast.unparse(node.value.left)} = {ast.unparse(node.value.comparators[0])}"
            diff = context.edit().replace(node.value, written).diff()
            yield hit("SS606", node, f"{ast.unparse(node.value)} compares and changes nothing", diff=diff)
        elif isinstance(node, ast.Call) and script.full(node.func).startswith("torch."):
            for keyword in node.keywords:
                if keyword.arg in _TYPOS:
                    message = f"{keyword.arg}= is not an argument of torch: requires_grad= is"
                    yield hit("SS606", keyword, message, snippet="requires_grad=True")


def _stored(context: Context, node: ast.Attribute) -> Iterator[Hit]:
    script = context.script
    if node.attr not in (*_TYPOS, *_METHODS) or name_of(node.value) in ("self", "cls") or _is_read(script, node.attr):
        return
    fixed = f"{ast.unparse(node.value)}.requires_grad"
    message = f"{ast.unparse(node)} is not {fixed}: nothing is frozen or trained by it"
    diff = context.edit().replace(node, fixed).diff()
    advice = _is_frozen_anyway(script, node)
    yield hit("SS606", node, message, diff=diff, snippet=f"{fixed} = False", advice=advice)


def _is_frozen_anyway(script: Script, node: ast.Attribute) -> bool:
    """`= False` of a tensor that a function of torch makes: it is not trained unless it becomes a parameter."""
    stmt, name = script.stmt_of(node), name_of(node.value)
    made = script.reaching(name, node)
    if made is None or not isinstance(stmt, ast.Assign) or getattr(stmt.value, "value", None) is not False:
        return False
    makers = [n for n in ast.walk(made[1]) if isinstance(n, ast.Call) and script.full(n.func) in _PLAIN_TENSORS]
    if not makers or any(k.arg == "requires_grad" for n in makers for k in n.keywords):
        return False
    becomes = [c for c in script.calls.get("Parameter", ()) if len(c.args) == 1 and not c.keywords]
    trained = {name_of(call.args[0]) for call in becomes}
    trained |= {
        name_of(c.func.value) for c in script.calls.get("requires_grad_", ()) if isinstance(c.func, ast.Attribute)
    }
    return name not in trained


def _is_read(script: Script, word: str) -> bool:
    """An attribute of the file's own, which something reads or a class defines."""
    if word in _METHODS:
        return False
    reads = (n for n in script.nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load))
    return any(n.attr == word for n in reads) or any(isinstance(n, ast.arg) and n.arg == word for n in script.nodes)


def _is_compared(value: ast.expr) -> bool:
    if not isinstance(value, ast.Compare) or len(value.ops) != 1 or not isinstance(value.ops[0], ast.Eq):
        return False
    constant = isinstance(value.comparators[0], ast.Constant) and isinstance(value.comparators[0].value, bool)
    return constant and isinstance(value.left, ast.Attribute) and value.left.attr == "requires_grad"
