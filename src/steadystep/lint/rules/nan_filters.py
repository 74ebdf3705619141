"""SS505: NaN losses that are kept out of the log while training goes on with them."""

import ast
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.names import argument, last, looks_like_loss, name_of
from steadystep.lint.report import Hit
from steadystep.lint.rules.nan_drops import ASKS_BAD, ASKS_GOOD, SAY_SO, dropped_losses, left_out_of_means
from steadystep.lint.rules.origins import origins
from steadystep.lint.rules.trained import cut_value, trained_losses


def check(context: Context) -> Iterator[Hit]:
    """The Trainer's filter, a loss that is repaired, a value that is dropped, a mean that leaves out, a log filter."""
    yield from _trainer(context)
    yield from _record_filter(context)
    if not trained_losses(context):
        return
    yield from _repaired(context)
    yield from _repaired_on_the_way(context)
    yield from dropped_losses(context)
    yield from left_out_of_means(context)


def _trainer(context: Context) -> Iterator[Hit]:
    for node in context.script.nodes:
        if isinstance(node, ast.keyword) and node.arg == "logging_nan_inf_filter":
            value: ast.expr = node.value
        elif isinstance(node, ast.Assign) and last(name_of(node.targets[0])) == "logging_nan_inf_filter":
            value = node.value
        else:
            continue
        if isinstance(value, ast.Constant) and value.value is True:
            diff = context.edit().replace(value, "False").diff()
            yield hit("SS505", node, "logging_nan_inf_filter=True hides NaN and infinity in the log", diff=diff)


def _record_filter(context: Context) -> Iterator[Hit]:
    """`"nan" not in record.getMessage()`."""
    for call in context.script.calls.get("getMessage", ()):
        for around in context.script.ancestors(call):
            asked = around.left if isinstance(around, ast.Compare) else None
            if isinstance(asked, ast.Constant) and str(asked.value).strip().lower() in ("nan", "inf", "loss nan"):
                yield hit("SS505", around, "lines of the log that say NaN are filtered out")


def _repaired(context: Context) -> Iterator[Hit]:
    """`loss = torch.nan_to_num(loss)`: the number is made good, the gradient is not."""
    script, losses = context.script, trained_losses(context)
    for name in ("nan_to_num", "nan_to_num_", "where"):
        for call in script.calls.get(name, ()):
            given = _repairs(call, name)
            stmt = script.stmt_of(call)
            if given is None or not looks_like_loss(name_of(cut_value(given))):
                continue
            if given is not None and name != "where" and _is_logged(context, call, given, stmt):
                yield hit("SS505", stmt, f"{ast.unparse(given)} is made finite before it is logged", snippet=SAY_SO)
                continue
            target = name_of(stmt.targets[0]) if isinstance(stmt, ast.Assign) else name_of(given)
            if (script.scope_of(call), target) in losses and _is_whole(stmt, call):
                message = f"{name_of(given)} is made finite before it is logged and trained on; its gradient is not"
                yield hit("SS505", stmt, message, snippet=SAY_SO)


def _repaired_on_the_way(context: Context) -> Iterator[Hit]:
    """The same in a function that gives the loss back."""
    script = context.script
    for event in context.events("backward"):
        for _, value in origins(script, event.loss, event.node):
            leaf = last(script.full(value.func)) if isinstance(value, ast.Call) and name_of(value.func) else ""
            leaf = leaf or (
                value.func.attr if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) else ""
            )
            plain = isinstance(value, ast.Call) and _repairs(value, leaf) is not None
            if (
                leaf in ("nan_to_num", "nan_to_num_")
                and plain
                and script.scope_of(value) is not script.scope_of(event.node)
            ):
                message = "the loss is made finite before it is logged and trained on; its gradient is not"
                yield hit("SS505", value, message, snippet=SAY_SO)


def _is_logged(context: Context, call: ast.Call, given: ast.expr, stmt: ast.stmt) -> bool:
    """A number of a trained loss is repaired on its way into a total, a list or a log, after the update."""
    script = context.script
    if (script.scope_of(call), name_of(cut_value(given))) not in set(trained_losses(context)):
        return False
    cut = cut_value(given) is not given or isinstance(script.parents.get(call), ast.Attribute)
    adds = isinstance(stmt, ast.AugAssign) or (isinstance(stmt, ast.Expr) and stmt.value is not call)
    late = any(
        e.line < stmt.lineno for e in context.events("backward") if script.scope_of(e.node) is script.scope_of(call)
    )
    return cut and adds and late


def _is_whole(stmt: ast.stmt, call: ast.Call) -> bool:
    return getattr(stmt, "value", None) is call


def _repairs(call: ast.Call, name: str) -> ast.expr | None:
    """The scalar that is repaired; `where` only as `where(isnan(loss), other, loss)` and the reverse."""
    if name != "where":
        own = call.func.value if isinstance(call.func, ast.Attribute) and not call.args else None
        return argument(call, 0, "input") or own
    if len(call.args) != 3 or not isinstance(call.args[0], ast.Call):
        return None
    asked = last(name_of(call.args[0].func))
    return call.args[2] if asked in ASKS_BAD else call.args[1] if asked in ASKS_GOOD else None
