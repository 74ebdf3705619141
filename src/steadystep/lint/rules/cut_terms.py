"""The terms and factors of a loss that leave the graph: a sum is cut by one term, a product only by all factors."""

import ast
import re
from collections.abc import Iterator

from steadystep.lint.names import last, looks_like_loss, name_of, path_of
from steadystep.lint.rules.origins import origins
from steadystep.lint.script import Script
from steadystep.lint.sources import elements, sources
from steadystep.lint.targets import target_of

_NUMBERS = ("item", "tolist", "numpy")
_TERM = re.compile(
    r"loss|penalt|(^|_)(reg|kl|kld|aux|recon|rec|ce|mse|dist|hint|consistency|perceptual|distill|kd)(_|$)", re.I
)
_DIVERGENCES = ("kl_div",)
_TAUGHT = re.compile(r"^(t|y)(_|$)|teach|target|label|^soft_?t", re.I)
_WEIGHT = re.compile(
    r"weight|lambda|lamb|alpha|beta|gamma|coe?ff?|scale|factor|ratio|^(w|c|k|n|lam|eps)(_|\d|$)|_w$", re.I
)
_DEEPEST = 9


def other_factor(product: ast.BinOp) -> ast.expr | None:
    """The factor that is no number, of `0.5 * loss` and `loss * weight`; None where both may carry the graph."""
    left, right = product.left, product.right
    for factor, other in ((left, right), (right, left)):
        if _is_number(factor) and (isinstance(factor, ast.Constant) or _is_loss(other)):
            return other
    return None


def _is_loss(node: ast.expr) -> bool:
    """`loss.detach()`, at once or by a name: of anything else a weight may be what is trained."""
    words = (n.id if isinstance(n, ast.Name) else getattr(n, "attr", "") for n in ast.walk(node))
    return any(looks_like_loss(word) for word in words)


def _is_number(node: ast.expr) -> bool:
    """A constant, or a name that weighs."""
    if isinstance(node, ast.BinOp):
        return _is_number(node.left) and _is_number(node.right)
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    named = path_of(node)
    return isinstance(node, ast.Constant) or (bool(_WEIGHT.search(last(named))) and not looks_like_loss(named))


def cut_terms(script: Script, loss: ast.expr, at: ast.AST, depth: int = 0) -> Iterator[ast.expr]:
    """The parts of a sum that leave the graph."""
    if depth > _DEEPEST:
        return
    match loss:
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            yield from cut_terms(script, loss.left, at, depth + 1)
            yield from cut_terms(script, loss.right, at, depth + 1)
        case ast.BinOp(op=ast.Mult() | ast.Div()):
            if isinstance(loss.op, ast.Div) or not _is_term(loss.right):
                yield from cut_terms(script, loss.left, at, depth + 1)
            if isinstance(loss.op, ast.Mult) and not _is_term(loss.left):
                yield from cut_terms(script, loss.right, at, depth + 1)
        case ast.Name() | ast.Subscript() | ast.Attribute() if depth < _DEEPEST:
            for stmt, value in origins(script, loss, at):
                if value is not loss and isinstance(value, ast.BinOp | ast.Call):
                    yield from cut_terms(script, value, stmt, depth + 1)
        case ast.Call():
            yield from _of_call(script, loss, at, depth)


def _is_term(node: ast.expr) -> bool:
    return isinstance(node, ast.Call | ast.BinOp) or looks_like_loss(path_of(node))


def _of_call(script: Script, call: ast.Call, at: ast.AST, depth: int) -> Iterator[ast.expr]:
    if isinstance(call.func, ast.Attribute) and call.func.attr in _NUMBERS:
        inner = call.func.value
        named = path_of(inner) or (name_of(inner.func) if isinstance(inner, ast.Call) else "")
        if depth > 0 and _TERM.search(last(named)):
            yield call
        return
    if last(script.full(call.func)) in _DIVERGENCES and len(call.args) > 1 and depth > 0:
        words = [name_of(n) for n in ast.walk(call.args[1]) if isinstance(n, ast.Name)]
        cut = [n for n in ast.walk(call.args[0]) if isinstance(n, ast.Attribute) and n.attr in ("data", "detach")]
        if cut and any(_TAUGHT.search(w) for w in words):
            yield cut[0]
    function = target_of(call, script)
    returns = [n for n in ast.walk(function) if isinstance(n, ast.Return)] if function is not None else []
    if function is None or not returns or any(script.scope_of(r) is not function for r in returns):
        return
    values = [r.value for r in returns if r.value is not None and not isinstance(r.value, ast.Constant)]
    cuts = [v for v in values if _ends_in_number(v)]
    if depth > 0 and cuts and len(cuts) == len(values):
        yield cuts[0]
    elif len(values) == 1:
        yield from cut_terms(script, values[0], returns[0], depth + 1)


def _ends_in_number(value: ast.expr) -> bool:
    """What a function that computes a part of the loss hands out: `.item()`, or a loss that it has just cut."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    if value.func.attr in _NUMBERS:
        return True
    inner = value.func.value
    return value.func.attr == "detach" and isinstance(inner, ast.Call) and looks_like_loss(name_of(inner.func))


def summed_cut(script: Script, loss: ast.expr) -> ast.expr | None:
    """The cut in `sum(parts.values())` or `sum(w * v.detach() for v in losses)`, where every part is cut."""
    stacked = isinstance(loss, ast.Call) and last(name_of(loss.func)) in ("sum", "stack", "fsum")
    if not isinstance(loss, ast.Call) or not stacked or not loss.args:
        return None
    table = loss.args[0]
    listed = [e for e, _ in elements(table, lambda e: sources(script, e))]
    found = [_cut_factor(e) for e in listed]
    return found[0] if found and all(f is not None for f in found) else None


def _cut_factor(node: ast.expr) -> ast.expr | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _cut_factor(node.left)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        one = other_factor(node)
        return _cut_factor(one) if one is not None else None
    cut = (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in (*_NUMBERS, "detach")
    )
    return node if cut else None
