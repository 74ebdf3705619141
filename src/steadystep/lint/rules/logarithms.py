"""SS307: the logarithm of a probability that can be zero."""

import ast
import re
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.control import switches_off
from steadystep.lint.names import last, name_of
from steadystep.lint.report import Hit
from steadystep.lint.rules.endings import ending_of
from steadystep.lint.rules.loss import under_no_grad
from steadystep.lint.script import Script

_SAFE = re.compile(
    r"eps|clamp|clip|tiny|finfo|smooth|1e-|minimum|maximum|0\.0*1|nan_to_num|xlogy|where|mask|delta", re.I
)
_TRAINS = re.compile(
    r"loss|forward|entropy|training_step|update|train|learn|objective|(^|_)kl|diverg|criterion|main", re.I
)
_DEEPEST = 4


def check(context: Context) -> Iterator[Hit]:
    """Every logarithm that a loss may go through."""
    script = context.script
    for call in script.calls.get("log", ()):
        given = _given(script, call)
        if given is None or under_no_grad(script, call) or not _is_trained_on(context, call):
            continue
        inner = given.right if _is_complement(given) and isinstance(given, ast.BinOp) else given
        found = ending_of(script, inner, call)
        if found is None or found[0] not in ("softmax", "sigmoid") or _is_safe(script, given, call):
            continue
        if _SAFE.search(ast.unparse(script.stmt_of(found[1]))) if isinstance(found[1], ast.expr) else True:
            continue
        word = {"softmax": "log_softmax", "sigmoid": "logsigmoid"}[found[0]]
        message = f"the logarithm of a {found[0]} is -inf where it rounds to zero; {word} is finite"
        snippet = f"torch.nn.functional.{word}(logits{', dim=-1' if found[0] == 'softmax' else ''})"
        yield hit("SS307", call, message, diff=_fused(context, call, given, word), snippet=snippet)


def _given(script: Script, call: ast.Call) -> ast.expr | None:
    """`p` of `torch.log(p)` and of `p.log()`."""
    if script.full(call.func) in ("torch.log", "torch.special.log"):
        return call.args[0] if call.args else None
    if isinstance(call.func, ast.Attribute) and not call.args and not call.keywords:
        return (
            call.func.value
            if script.full(call.func.value).partition(".")[0] not in ("torch", "numpy", "math")
            else None
        )
    return None


def _is_complement(node: ast.expr) -> bool:
    """`1 - p`."""
    return (
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and getattr(node.left, "value", None) in (1, 1.0)
    )


def _is_trained_on(context: Context, call: ast.Call) -> bool:
    script, scope = context.script, context.script.scope_of(call)
    if scope is None:
        return any(call.lineno < e.line for e in context.events("backward"))
    if switches_off(scope, script):
        return False
    return bool(_TRAINS.search(scope.name)) or any(script.scope_of(e.node) is scope for e in context.events("backward"))


def _is_safe(script: Script, node: ast.expr, at: ast.AST, depth: int = 0) -> bool:
    """Something is added, or it is kept above a limit, here or where it comes from."""
    if isinstance(node, ast.Name):
        found = script.reaching(node.id, at)
        return found is not None and depth < _DEEPEST and _is_safe(script, found[1], found[0], depth + 1)
    rows = {id(i) for n in ast.walk(node) if isinstance(n, ast.Subscript) for i in ast.walk(n.slice)}
    added = (n for n in ast.walk(node) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Add) and id(n) not in rows)
    if _SAFE.search(ast.unparse(node)) or any(added):
        return True
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name) and n is not node]
    return depth < _DEEPEST and any(_is_safe(script, n, at, depth + 1) for n in names if not _is_called(script, n))


def _is_called(script: Script, node: ast.Name) -> bool:
    parent = script.parents.get(node)
    return isinstance(parent, ast.Call) and parent.func is node


def _fused(context: Context, call: ast.Call, given: ast.expr, word: str) -> str:
    """`F.log_softmax(x, dim=1)` for `torch.log(F.softmax(x, dim=1))`."""
    if word != "log_softmax" or not isinstance(given, ast.Call) or last(name_of(given.func)) != "softmax":
        return ""
    return context.edit().replace(call, ast.unparse(given).replace("softmax(", "log_softmax(", 1)).diff()
