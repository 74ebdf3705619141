"""SS308: a prediction that goes through numpy on its way to the loss."""

import ast
import re
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.names import last, looks_like_loss, name_of, parameters
from steadystep.lint.networks import is_model_call
from steadystep.lint.report import Hit
from steadystep.lint.rules.loss import cut_at, under_no_grad
from steadystep.lint.script import Script, ScriptScope

_BACK = ("from_numpy", "tensor", "as_tensor", "Tensor", "FloatTensor")
_SAME = (
    "to",
    "cuda",
    "float",
    "squeeze",
    "unsqueeze",
    "view",
    "reshape",
    "requires_grad_",
    "double",
    "mean",
    "sum",
    "T",
)
_COMPUTES = re.compile(r"loss|^training_step$|^forward_backward", re.I)
_DEEPEST = 5


def check(context: Context) -> Iterator[Hit]:
    """For every backward: the loss is a function of a tensor that was made from numbers of the network."""
    seen: set[ast.AST] = set()
    for loss in _losses(context):
        made = _made_from_numbers(context, loss)
        if made is not None and made not in seen:
            seen.add(made)
            message = f"{_short(made)} is a new tensor without a graph: no gradient reaches the network through it"
            yield hit(
                "SS308", made, message, snippet="loss = criterion(model(x), y)   # stay in torch up to backward()"
            )


def _losses(context: Context) -> Iterator[ast.Call]:
    """Calls that give a term of what backward is called on, or of what a function that computes a loss gives back."""
    script = context.script
    waiting: list[tuple[ast.AST, ast.expr, int]] = []
    for event in context.events("backward"):
        if not event.no_grad and event.loss is not None:
            waiting.append((event.node, event.loss, 0))
    for node in script.nodes:
        scope = script.scope_of(node) if isinstance(node, ast.Return) and node.value is not None else None
        if scope is not None and _COMPUTES.search(scope.name) and isinstance(node, ast.Return):
            waiting += [(node, node.value, 0)] if node.value is not None else []
    while waiting:
        at, expr, depth = waiting.pop()
        if isinstance(expr, ast.Name) and depth < _DEEPEST:  # in every arm of an `if`, not only in the last
            scope = script.scope_of(at)
            named = [*script.assigned.get((scope, expr.id), ()), *_added(script).get((scope, expr.id), ())]
            waiting += [(s, v, depth + 1) for s, v in named if s.lineno < script.stmt_of(at).lineno]
            continue
        value = _value(script, expr, at)
        if isinstance(value, ast.Name) and value is not expr and depth < _DEEPEST:
            waiting.append((at, value, depth + 1))
        if isinstance(value, ast.BinOp):
            waiting += [(at, part, depth + 1) for part in (value.left, value.right) if depth < _DEEPEST]
        elif isinstance(value, ast.Call) and not under_no_grad(script, value):
            yield value


def _added(script: Script) -> dict[tuple[ScriptScope, str], list[tuple[ast.stmt, ast.expr]]]:
    """`loss += criterion(out, y)`, by the name that is added to."""
    return script.once("added to names", lambda: _all_added(script))


def _all_added(script: Script) -> dict[tuple[ScriptScope, str], list[tuple[ast.stmt, ast.expr]]]:
    found: dict[tuple[ScriptScope, str], list[tuple[ast.stmt, ast.expr]]] = {}
    for node in script.nodes:
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and isinstance(node.target, ast.Name):
            found.setdefault((script.scope_of(node), node.target.id), []).append((node, node.value))
    return found


def _value(script: Script, node: ast.expr | None, at: ast.AST) -> ast.expr | None:
    """What a name was last given, without methods that keep the values."""
    for _ in range(_DEEPEST):
        method = node.func if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
        if method is not None and method.attr in _SAME and not script.full(method).startswith("torch."):
            node = method.value
            continue
        found = script.reaching(node.id, at) if isinstance(node, ast.Name) else None
        if found is None:
            return node
        at, node = found
    return node


def _made_from_numbers(context: Context, loss: ast.Call) -> ast.expr | None:
    """`criterion(torch.tensor(numbers), y)`, where the numbers are the network's and nothing else has its graph."""
    script = context.script
    leaf = last(name_of(loss.func))
    known = looks_like_loss(script.full(loss.func)) or "criterion" in leaf.lower() or leaf.endswith("cross_entropy")
    if not known or not loss.args:
        return None
    first = _value(script, loss.args[0], loss)
    if not isinstance(first, ast.Call) or last(script.full(first.func)) not in _BACK or not first.args:
        return None
    if any(_has_graph(script, other, loss) for other in loss.args[1:]):
        return None
    return first if _is_numbers_of_network(script, first.args[0], loss) else None


def _names(node: ast.AST) -> list[ast.Name]:
    return [n for n in ast.walk(node) if isinstance(n, ast.Name)]


def _is_numbers_of_network(script: Script, node: ast.expr, at: ast.AST, depth: int = 0) -> bool:
    """`model(x).detach().cpu().numpy()`, at once or through names."""
    cut = any(isinstance(n, ast.Attribute) and n.attr in ("numpy", "tolist", "item") for n in ast.walk(node))
    if cut and any(_has_graph(script, part, at) for part in ast.walk(node) if isinstance(part, ast.Name | ast.Call)):
        return True
    if depth > _DEEPEST:
        return False
    for name in _names(node):
        found = script.reaching(name.id, at)
        if found is not None and found[1] is not node and _is_numbers_of_network(script, found[1], found[0], depth + 1):
            return True
    return False


def _has_graph(script: Script, node: ast.AST, at: ast.AST, depth: int = 0) -> bool:
    """A network has run for it, with gradients, and nothing has cut it off since."""
    cut = {
        id(n) for c in ast.walk(node) if isinstance(c, ast.expr) and c is not node and cut_at(c) for n in ast.walk(c)
    }
    parts = [n for n in ast.walk(node) if id(n) not in cut]
    runs = [n for n in parts if isinstance(n, ast.Call) and is_model_call(n, script)]
    if any(not under_no_grad(script, n) for n in runs):
        return True
    if depth > _DEEPEST or (isinstance(node, ast.expr) and cut_at(node)):
        return False
    found = [script.reaching(n.id, at) for n in parts if isinstance(n, ast.Name)]
    scope = script.scope_of(at)
    asked = [n.id for n in parts if isinstance(n, ast.Name) and scope is not None and n.id in parameters(scope)]
    given = [v for name in asked if script.reaching(name, at) is None for v in script.values(name, at)]
    if any(v is not node and _has_graph(script, v, v, depth + 1) for v in given):  # by those who call
        return True
    return any(f is not None and f[1] is not node and _has_graph(script, f[1], f[0], depth + 1) for f in found)


def _short(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 50 else text[:47] + "..."
