"""What goes into the loss: SS303 softmax before cross-entropy, SS304 sigmoid twice, SS305 NLL of probabilities."""

import ast
from collections.abc import Iterator

from steadystep.lint.constructors import made
from steadystep.lint.context import Context, hit
from steadystep.lint.names import argument, chained, last, name_of, path_of
from steadystep.lint.report import Hit
from steadystep.lint.rules.endings import FUNCTIONS, LAYERS, Ending, ending_of
from steadystep.lint.script import Script
from steadystep.lint.sources import named_sources

_LOSSES = {
    "torch.nn.functional.cross_entropy": "ce",
    "torch.nn.functional.binary_cross_entropy_with_logits": "bce",
    "torch.nn.functional.nll_loss": "nll",
}
_CRITERIA = {"CrossEntropyLoss": "ce", "BCEWithLogitsLoss": "bce", "NLLLoss": "nll"}


def check(context: Context) -> Iterator[Hit]:
    """All three, at every loss whose kind is known."""
    script = context.script
    for calls in list(script.calls.values()):
        for call in calls:
            kind = _loss_kind(script, call) if not script.is_foreign(call) else ""
            given = argument(call, 0, "input") if kind else None
            found = ending_of(script, given, call) if given is not None else None
            if found is not None:
                yield from _judge(context, kind, *found)


def _judge(context: Context, kind: str, ending: Ending, node: ast.AST) -> Iterator[Hit]:
    diff = _taken_out(context, node)
    if kind == "ce" and ending == "softmax":
        yield hit("SS303", node, "softmax before a cross-entropy that expects raw scores", diff=diff, snippet=_RAW)
    elif kind == "logits" and ending in ("softmax", "sigmoid"):
        code = "SS303" if ending == "softmax" else "SS304"
        yield hit(code, node, f"{ending} before a loss that expects logits", diff=diff, snippet=_RAW)
    elif kind == "ce" and ending == "log_softmax":
        message = "log_softmax before a cross-entropy that applies it again: harmless, but not needed"
        yield hit("SS303", node, message, diff=diff, advice=True)
    elif kind == "bce" and ending == "sigmoid":
        yield hit("SS304", node, "sigmoid before a loss that expects logits", diff=diff, snippet=_RAW)
    elif kind == "nll" and ending in ("softmax", "sigmoid"):
        yield hit(
            "SS305", node, f"NLL loss of {ending} outputs: it expects log-probabilities", diff=_logged(context, node)
        )


def _loss_kind(script: Script, call: ast.Call) -> str:
    """By its full name, or by what a name, an attribute or an entry of a table stands for."""
    full = script.full(call.func)
    if full in _LOSSES:
        return _LOSSES[full]
    if isinstance(call.func, ast.Call):
        return _CRITERIA.get(last(script.full(call.func.func)), "") or _kind_of(script, call.func)
    if full.partition(".")[0] in ("torch", "numpy", "math", "os") or not path_of(call.func):
        return ""
    made = [value for value, _ in named_sources(script, path_of(call.func), call)]
    again = [v for v in made if (script.scope_of(v), name_of(chained(v))) in script.assigned]
    kinds = {_kind_of(script, value) for value in made if value not in again}  # `criterion = criterion.cuda()`
    if kinds == {"ce", "bce"}:
        return "logits"  # chosen by an option, and raw scores either way
    return kinds.pop() if len(kinds) == 1 else ""


def _kind_of(script: Script, value: ast.expr) -> str:
    """`nn.CrossEntropyLoss()`, `F.cross_entropy`, `partial(F.cross_entropy, ...)`, `staticmethod(F.cross_entropy)`."""
    if isinstance(value, ast.Call):
        leaf = last(script.full(value.func))
        if leaf in ("partial", "staticmethod") and value.args:
            return _kind_of(script, value.args[0])
        return _CRITERIA.get(last(made(value, script)[0]), "")
    return _LOSSES.get(script.full(value), "")


def _taken_out(context: Context, node: ast.AST) -> str:
    """The fix: the argument in place of the call, or the layer's line gone."""
    if not isinstance(node, ast.Call):
        return ""
    stmt = context.script.stmt_of(node)
    if last(context.script.full(node.func)) in LAYERS and node.lineno != stmt.lineno:
        gone = ast.Expr(value=node, lineno=node.lineno, end_lineno=node.end_lineno)
        return context.edit().remove(gone).diff()
    if last(context.script.full(node.func)) in LAYERS:
        return context.edit().replace(node, "nn.Identity()").diff() if "nn" in context.script.imports else ""
    if isinstance(node.func, ast.Attribute) and not name_of(node.func.value).endswith(
        ("functional", "F", "torch", "special")
    ):
        return context.edit().replace(node, ast.unparse(node.func.value)).diff()
    if node.args and last(context.script.full(node.func)) in FUNCTIONS:
        return context.edit().replace(node, ast.unparse(node.args[0])).diff()
    return ""


def _logged(context: Context, node: ast.AST) -> str:
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("softmax"):
        return context.edit().replace(node.func, ast.unparse(node.func).replace("softmax", "log_softmax")).diff()
    return ""


_RAW = "loss = criterion(logits, target)   # what comes before the softmax or the sigmoid"
