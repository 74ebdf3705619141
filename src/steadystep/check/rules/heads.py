"""What goes into the loss: SS303 softmax before cross-entropy, SS304 sigmoid twice, SS305 NLL of probabilities."""

import ast
from collections.abc import Iterator
from typing import Literal

from steadystep.check.context import Context, hit
from steadystep.check.hit import Hit
from steadystep.check.names import argument, last, name_of
from steadystep.check.roles import is_module_class
from steadystep.check.script import Script

Ending = Literal["softmax", "log_softmax", "sigmoid"]
Found = tuple[Ending, ast.AST]

_FUNCTIONS: dict[str, Ending] = {"softmax": "softmax", "log_softmax": "log_softmax", "sigmoid": "sigmoid"}
_LAYERS: dict[str, Ending] = {"Softmax": "softmax", "LogSoftmax": "log_softmax", "Sigmoid": "sigmoid"}
_LOSSES = {
    "torch.nn.functional.cross_entropy": "ce",
    "torch.nn.functional.binary_cross_entropy_with_logits": "bce",
    "torch.nn.functional.nll_loss": "nll",
}
_CRITERIA = {"CrossEntropyLoss": "ce", "BCEWithLogitsLoss": "bce", "NLLLoss": "nll"}
_SHAPING = ("view", "reshape", "flatten", "squeeze", "transpose", "permute", "float", "contiguous", "unsqueeze", "to")


def check(context: Context) -> Iterator[Hit]:
    """All three, at every loss whose kind is known."""
    script = context.script
    for calls in list(script.calls.values()):
        for call in calls:
            kind = _loss_kind(script, call)
            given = argument(call, 0, "input") if kind else None
            found = _ending(script, given, call) if given is not None else None
            if found is not None:
                yield from _judge(context, kind, *found)


def _judge(context: Context, kind: str, ending: Ending, node: ast.AST) -> Iterator[Hit]:
    diff = _taken_out(context, node)
    if kind == "ce" and ending == "softmax":
        yield hit("SS303", node, "softmax before a cross-entropy that expects raw scores", diff=diff)
    elif kind == "ce" and ending == "log_softmax":
        message = "log_softmax before a cross-entropy that applies it again: harmless, but not needed"
        yield hit("SS303", node, message, diff=diff, advice=True)
    elif kind == "bce" and ending == "sigmoid":
        yield hit("SS304", node, "sigmoid before a loss that expects logits", diff=diff)
    elif kind == "nll" and ending in ("softmax", "sigmoid"):
        yield hit(
            "SS305", node, f"NLL loss of {ending} outputs: it expects log-probabilities", diff=_logged(context, node)
        )


def _loss_kind(script: Script, call: ast.Call) -> str:
    full = script.full(call.func)
    if full in _LOSSES:
        return _LOSSES[full]
    if isinstance(call.func, ast.Call):
        return _CRITERIA.get(last(script.full(call.func.func)), "")
    values = script.values(name_of(call.func), call)
    kinds = {_CRITERIA.get(last(script.full(v.func)), "") if isinstance(v, ast.Call) else "" for v in values}
    kinds |= {_CRITERIA[last(script.full(v.func.value.func))] for v in values if _moved_criterion(script, v)} - {""}  # type: ignore[attr-defined]
    kinds -= {""} if len(kinds) > 1 and all(_moved_criterion(script, v) for v in values) else set()
    return kinds.pop() if len(kinds) == 1 else ""


def _moved_criterion(script: Script, value: ast.expr) -> bool:
    """`nn.CrossEntropyLoss().to(device)`."""
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and isinstance(value.func.value, ast.Call)
        and last(script.full(value.func.value.func)) in _CRITERIA
    )


def _ending(script: Script, node: ast.expr, at: ast.AST, depth: int = 0) -> Found | None:
    """What an expression was put through last."""
    if depth > 5:
        return None
    if isinstance(node, ast.Name):
        found = script.reaching(node.id, at)
        if found is None or _conditional(script, found[0], at) or not _single(found[0], node.id):
            return None
        return _ending(script, found[1], found[0], depth + 1)
    if not isinstance(node, ast.Call):
        return None
    full = script.full(node.func)
    method = node.func.attr if isinstance(node.func, ast.Attribute) else last(full)
    if method in _FUNCTIONS and not full.startswith("self."):
        return _FUNCTIONS[method], node
    if isinstance(node.func, ast.Call) and last(script.full(node.func.func)) in _LAYERS:
        return _LAYERS[last(script.full(node.func.func))], node
    if isinstance(node.func, ast.Attribute) and method in _SHAPING:
        return _ending(script, node.func.value, at, depth + 1)
    name = name_of(node.func)
    if name in ("self", "self.forward"):
        return _of_self(script, node, depth)
    return _of_value(script, name.removesuffix(".forward"), node, depth)


def _of_value(script: Script, name: str, at: ast.AST, depth: int) -> Found | None:
    """The ending of the network or the layer a name stands for."""
    values = script.values(name, at) if name else []
    if len(values) != 1 or not isinstance(values[0], ast.Call):
        return None
    made = values[0]
    while (
        isinstance(made.func, ast.Attribute)
        and made.func.attr in ("to", "cuda", "train")
        and isinstance(made.func.value, ast.Call)
    ):
        made = made.func.value
    leaf = last(script.full(made.func))
    if leaf in _LAYERS:
        return _LAYERS[leaf], at
    if leaf == "Sequential" and made.args and isinstance(made.args[-1], ast.Call):
        tail = made.args[-1]
        ending = _LAYERS.get(last(script.full(tail.func)))
        return (ending, tail) if ending else None
    if leaf in script.classes:
        return _of_forward(script, script.classes[leaf], depth)
    return None


def _of_self(script: Script, call: ast.Call, depth: int) -> Found | None:
    """`self(x)` in a network, unless a subclass in the file has another forward."""
    owner = script.class_of(call)
    if owner is None or not is_module_class(owner, script) or _defines(owner, "__call__"):
        return None
    for other in script.classes.values():
        if owner.name in {last(name_of(base)) for base in other.bases} and _defines(other, "forward"):
            return None
    return _of_forward(script, owner, depth)


def _defines(owner: ast.ClassDef, name: str) -> bool:
    return any(isinstance(m, ast.FunctionDef) and m.name == name for m in owner.body)


def _of_forward(script: Script, owner: ast.ClassDef, depth: int) -> Found | None:
    """What every return of `forward` ends in; two kinds of returns mean nothing is known."""
    forward = next((m for m in owner.body if isinstance(m, ast.FunctionDef) and m.name == "forward"), None)
    returns = [n for n in ast.walk(forward) if isinstance(n, ast.Return) and n.value is not None] if forward else []
    found = [_ending(script, r.value, r, depth + 1) for r in returns if r.value is not None]
    if not found or any(f is None for f in found) or len({f[0] for f in found if f}) != 1:
        return None
    return found[0]


def _single(stmt: ast.stmt, name: str) -> bool:
    return isinstance(stmt, ast.Assign) and any(name_of(target) == name for target in stmt.targets)


def _conditional(script: Script, stmt: ast.stmt, at: ast.AST) -> bool:
    """An assignment in an arm that the place itself is not in."""
    around = set(script.ancestors(at))
    return any(isinstance(a, ast.If | ast.Try) and a not in around for a in script.ancestors(stmt))


def _taken_out(context: Context, node: ast.AST) -> str:
    """The fix: the argument in place of the call, or the layer's line gone."""
    if not isinstance(node, ast.Call):
        return ""
    stmt = context.script.stmt_of(node)
    if last(context.script.full(node.func)) in _LAYERS and node.lineno != stmt.lineno:
        gone = ast.Expr(value=node, lineno=node.lineno, end_lineno=node.end_lineno)
        return context.edit().remove(gone).diff()
    if isinstance(node.func, ast.Attribute) and not name_of(node.func.value).endswith(
        ("functional", "F", "torch", "special")
    ):
        return context.edit().replace(node, ast.unparse(node.func.value)).diff()
    if node.args and last(context.script.full(node.func)) in _FUNCTIONS:
        return context.edit().replace(node, ast.unparse(node.args[0])).diff()
    return ""


def _logged(context: Context, node: ast.AST) -> str:
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("softmax"):
        return context.edit().replace(node.func, ast.unparse(node.func).replace("softmax", "log_softmax")).diff()
    return ""
