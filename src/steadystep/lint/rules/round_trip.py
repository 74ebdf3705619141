"""SS308: a prediction that goes through numpy on its way to the loss."""

import ast
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.events import Event
from steadystep.lint.names import last, looks_like_loss, name_of
from steadystep.lint.networks import is_model_call
from steadystep.lint.report import Hit
from steadystep.lint.script import Script

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
_DEEPEST = 5


def check(context: Context) -> Iterator[Hit]:
    """For every backward: the loss is a function of a tensor that was made from numbers of the network."""
    seen: set[ast.AST] = set()
    for event in context.events("backward"):
        loss = _value(context.script, event.loss, event.node)
        if event.no_grad or loss is None:
            continue
        made = _made_from_numbers(context, loss, event)
        if made is not None and made not in seen:
            seen.add(made)
            message = f"{_short(made)} is a new tensor without a graph: no gradient reaches the network through it"
            yield hit(
                "SS308", made, message, snippet="loss = criterion(model(x), y)   # stay in torch up to backward()"
            )


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


def _made_from_numbers(context: Context, loss: ast.expr, event: Event) -> ast.expr | None:
    """`criterion(torch.tensor(numbers), y)`, where the numbers are the network's and nothing else has its graph."""
    script = context.script
    known = isinstance(loss, ast.Call) and (
        looks_like_loss(script.full(loss.func)) or last(name_of(loss.func)).endswith(("criterion", "cross_entropy"))
    )
    if not isinstance(loss, ast.Call) or not known or not loss.args:
        return None
    first = _value(script, loss.args[0], event.node)
    if not isinstance(first, ast.Call) or last(script.full(first.func)) not in _BACK or not first.args:
        return None
    if any(_has_graph(script, other, event.node) for other in loss.args[1:]):
        return None
    return first if _is_numbers_of_network(script, first.args[0], event.node) else None


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
    """A network has run for it."""
    if any(isinstance(n, ast.Call) and is_model_call(n, script) for n in ast.walk(node)):
        return True
    if depth > _DEEPEST:
        return False
    found = [script.reaching(n.id, at) for n in _names(node)]
    return any(f is not None and f[1] is not node and _has_graph(script, f[1], f[0], depth + 1) for f in found)


def _short(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 50 else text[:47] + "..."
