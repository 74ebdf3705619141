"""SS505: NaN losses that are kept out of the log while training goes on with them."""

import ast
from collections.abc import Iterator

from steadystep.check.bindings import parameters
from steadystep.check.context import Context, hit
from steadystep.check.hit import Hit
from steadystep.check.names import argument, last, looks_like_loss, name_of
from steadystep.check.rules.trained import calls_with_loss, cut_value, trained_losses
from steadystep.check.script import Scope, Script

_ASKS_BAD = ("isnan", "isinf")
_ASKS_GOOD = ("isfinite",)
_TELLS = (
    "print",
    "warn",
    "warning",
    "error",
    "info",
    "debug",
    "log",
    "critical",
    "exception",
    "write",
    "exit",
    "_exit",
)


def check(context: Context) -> Iterator[Hit]:
    """The Trainer's filter, a loss that is repaired, a value that is dropped, a mean that leaves out, a log filter."""
    yield from _trainer(context)
    yield from _record_filter(context)
    if not trained_losses(context):
        return
    yield from _repaired(context)
    yield from _dropped(context)
    yield from _left_out(context)


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
            if given is None or not looks_like_loss(name_of(given)):
                continue
            target = name_of(stmt.targets[0]) if isinstance(stmt, ast.Assign) else name_of(given)
            if (script.scope_of(call), target) in losses and _is_whole(stmt, call):
                message = f"{name_of(given)} is made finite before it is logged and trained on; its gradient is not"
                yield hit("SS505", stmt, message, snippet=_SAY_SO)


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
    return call.args[2] if asked in _ASKS_BAD else call.args[1] if asked in _ASKS_GOOD else None


def _dropped(context: Context) -> Iterator[Hit]:
    """A meter, or the loop itself, that adds a loss up only if it is finite, and says nothing otherwise."""
    script = context.script
    for position, function in calls_with_loss(context):
        names = [p for p in parameters(function) if p != "self"]
        if position < len(names) and not _says_something(function):
            yield from _dropping(script, function, names[position])
    for scope, name in _values(context):
        for node in ast.walk(scope or script.tree):
            if script.scope_of(node) is scope and script.loops_of(node) and _hides(script, node, name):
                yield hit("SS505", node, f"{name} is left out of the log when it is not finite", snippet=_SAY_SO)


def _values(context: Context) -> list[tuple[Scope, str]]:
    """Trained losses, and numbers that were read from them after the update."""
    losses = trained_losses(context)
    found = dict.fromkeys(losses)
    for (scope, name), assigned in context.script.assigned.items():
        if all((scope, name_of(cut_value(value))) in found and value is not cut_value(value) for _, value in assigned):
            found[scope, name] = None
    return list(found)


def _hides(script: Script, node: ast.AST, name: str) -> bool:
    """`if isfinite(loss): total += loss`, or `total += loss if loss == loss else 0`; both only after the update."""
    if isinstance(node, ast.If) and not node.orelse:
        if len(node.body) == 1 and isinstance(node.body[0], ast.Continue):
            return _asks(node.test, name, good=False) and _only_logs_after(script, node)
        return _asks(node.test, name, good=True) and _only_adds(node.body, name)
    if isinstance(node, ast.IfExp) and isinstance(script.stmt_of(node), ast.AugAssign):
        return _asks(node.test, name, good=True) and name in {name_of(n) for n in ast.walk(node.body)}
    return False


def _only_logs_after(script: Script, node: ast.If) -> bool:
    """The update is made before this, so that what is skipped is the log alone."""
    block = getattr(script.parents.get(node), "body", [])
    before = [n for s in block[: block.index(node)] for n in ast.walk(s)] if node in block else []
    after = [n for s in block[block.index(node) + 1 :] for n in ast.walk(s)] if node in block else []
    steps = [n for n in before if isinstance(n, ast.Attribute) and n.attr == "step"]
    return bool(steps) and not any(isinstance(n, ast.Attribute) and n.attr in ("step", "backward") for n in after)


def _dropping(script: Script, function: ast.AST, name: str) -> Iterator[Hit]:
    body = getattr(function, "body", [])
    for stmt in body:
        if not isinstance(stmt, ast.If):
            continue
        leaves = len(stmt.body) == 1 and isinstance(stmt.body[0], ast.Return) and stmt.body[0].value is None
        if leaves and not stmt.orelse and _asks(stmt.test, name, good=False):
            yield hit("SS505", stmt, f"{name} is dropped when it is not finite, and nobody is told", snippet=_SAY_SO)
        elif not stmt.orelse and _asks(stmt.test, name, good=True) and _only_adds(stmt.body, name):
            yield hit("SS505", stmt, f"{name} is left out when it is not finite, and nobody is told", snippet=_SAY_SO)


def _says_something(function: ast.AST) -> bool:
    """Reports, raises or counts what it drops."""
    for node in ast.walk(function):
        if isinstance(node, ast.Raise | ast.Assert):
            return True
        if isinstance(node, ast.Call) and last(name_of(node.func)) in _TELLS:
            return True
        if isinstance(node, ast.If) and any(isinstance(n, ast.AugAssign) for s in node.orelse for n in ast.walk(s)):
            return True
    return False


def _asks(test: ast.expr, name: str, *, good: bool) -> bool:
    """Whether a test is `isnan(name)` or the like; with `good` whether it is true of finite values."""
    if isinstance(test, ast.BoolOp):
        return all(_asks(part, name, good=good) for part in test.values)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _asks(test.operand, name, good=not good)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:  # only NaN differs from itself
        twice = name_of(test.left) == name == name_of(test.comparators[0])
        return twice and isinstance(test.ops[0], ast.Eq if good else ast.NotEq)
    if not isinstance(test, ast.Call):
        return False
    asked = last(name_of(test.func))
    about = [name_of(cut_value(n)) for n in (*test.args, getattr(test.func, "value", test))]
    return name in about and asked in (_ASKS_GOOD if good else _ASKS_BAD)


def _only_adds(body: list[ast.stmt], name: str) -> bool:
    """The loss is added up, listed or logged here and nothing else is done."""
    for stmt in body:
        adds = isinstance(stmt, ast.AugAssign)
        call = stmt.value if isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Call) else None
        lists = call is not None and isinstance(call.func, ast.Attribute) and call.func.attr in ("append", "update")
        if not adds and not lists:
            return False
    return any(name in {name_of(n) for n in ast.walk(stmt)} for stmt in body)


def _left_out(context: Context) -> Iterator[Hit]:
    """`np.nanmean(losses)` of a list of training losses, or a list that is filtered before its mean is taken."""
    script = context.script
    listed = set()
    for scope, name in trained_losses(context):
        for call in script.calls.get("append", ()):
            if script.scope_of(call) is scope and call.args and name_of(cut_value(call.args[0])) == name:
                assert isinstance(call.func, ast.Attribute)
                listed.add((scope, name_of(call.func.value)))
    for leaf in ("nanmean", "nanmedian", "nansum"):
        for call in script.calls.get(leaf, ()):
            if call.args and (script.scope_of(call), name_of(call.args[0])) in listed:
                held = name_of(call.args[0])
                yield hit("SS505", call, f"{leaf} leaves the NaN losses in {held} out", snippet=_SAY_SO)
    for node in script.nodes:
        if isinstance(node, ast.ListComp | ast.GeneratorExp) and len(node.generators) == 1:
            part = node.generators[0]
            held, each = name_of(part.iter), name_of(part.target)
            if (
                (script.scope_of(node), held) in listed
                and part.ifs
                and all(_asks(t, each, good=True) for t in part.ifs)
            ):
                yield hit("SS505", node, f"the NaN losses in {held} are left out", snippet=_SAY_SO)


_SAY_SO = """if not torch.isfinite(loss):
    logger.warning("loss is %s at step %d", loss.item(), step)"""
