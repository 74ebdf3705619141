"""SS505 in a meter, a mean or the loop: a loss that is dropped or replaced when it is not finite, without a word."""

import ast
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.names import Function, last, name_of
from steadystep.lint.report import Hit
from steadystep.lint.rules.trained import calls_with_loss, cut_value, trained_losses
from steadystep.lint.script import Script, ScriptScope

ASKS_BAD = ("isnan", "isinf")
ASKS_GOOD = ("isfinite",)

SAY_SO = """if not torch.isfinite(loss):
    logger.warning("loss is %s at step %d", loss.item(), step)"""
"""What to do instead of hiding it."""

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


def asks(test: ast.expr, name: str, *, good: bool) -> bool:
    """Whether a test is `isnan(name)` or the like; with `good` whether it is true of finite values."""
    if isinstance(test, ast.BoolOp):
        return all(asks(part, name, good=good) for part in test.values)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return asks(test.operand, name, good=not good)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and "inf" in ast.unparse(test.comparators[0]):
        asked_of = name_of(test.left) or ast.unparse(test.left).removeprefix("abs(").removesuffix(")")
        fine = isinstance(test.ops[0], ast.NotIn | ast.NotEq | ast.Lt)
        return asked_of == name and fine == good
    if isinstance(test, ast.Compare) and len(test.ops) == 1:  # only NaN differs from itself
        twice = name_of(test.left) == name == name_of(test.comparators[0])
        return twice and isinstance(test.ops[0], ast.Eq if good else ast.NotEq)
    if not isinstance(test, ast.Call):
        return False
    if isinstance(test.func, ast.Attribute) and test.func.attr in ("any", "all", "bool", "item") and not test.args:
        return asks(test.func.value, name, good=good)  # torch.isnan(loss).any()
    asked = last(name_of(test.func))
    about = [name_of(cut_value(n)) for n in (*test.args, getattr(test.func, "value", test))]
    return name in about and asked in (ASKS_GOOD if good else ASKS_BAD)


def dropped_losses(context: Context) -> Iterator[Hit]:
    """A meter, or the loop itself, that adds a loss up only if it is finite, and says nothing otherwise."""
    script = context.script
    for name, function in calls_with_loss(context):
        goes_back = any(isinstance(n, ast.Attribute) and n.attr == "backward" for n in ast.walk(function))
        if not goes_back and not _says_something(function):
            yield from _dropping(script, function, name)
    for scope, name in _values(context):
        for node in ast.walk(scope or script.tree):
            if script.scope_of(node) is scope and script.loops_of(node) and _hides(script, node, name):
                yield hit("SS505", node, f"{name} is left out of the log when it is non-finite", snippet=SAY_SO)


def _values(context: Context) -> list[tuple[ScriptScope, str]]:
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
            return asks(node.test, name, good=False) and _only_logs_after(script, node)
        return asks(node.test, name, good=True) and _only_adds(node.body, name)
    if isinstance(node, ast.IfExp) and _is_running_mean(script.stmt_of(node)):
        return _chooses(node, name)
    if isinstance(node, ast.IfExp) and isinstance(script.stmt_of(node), ast.AugAssign):
        return asks(node.test, name, good=True) and name in {name_of(n) for n in ast.walk(node.body)}
    return False


def _is_running_mean(stmt: ast.stmt) -> bool:
    """`avg = 0.9 * avg + 0.1 * x`."""
    names = {name_of(t) for t in stmt.targets} - {""} if isinstance(stmt, ast.Assign) else set()
    return isinstance(stmt, ast.Assign) and bool(names & {name_of(n) for n in ast.walk(stmt.value)})


def _only_logs_after(script: Script, node: ast.If) -> bool:
    """The update is made before this, so that what is skipped is the log alone."""
    block = getattr(script.parents.get(node), "body", [])
    before = [n for s in block[: block.index(node)] for n in ast.walk(s)] if node in block else []
    after = [n for s in block[block.index(node) + 1 :] for n in ast.walk(s)] if node in block else []
    steps = [n for n in before if isinstance(n, ast.Attribute) and n.attr == "step"]
    return bool(steps) and not any(isinstance(n, ast.Attribute) and n.attr in ("step", "backward") for n in after)


def _dropping(script: Script, function: Function, name: str) -> Iterator[Hit]:
    """In a function that is given the loss, or one of several by name."""
    names = {name, *_listed(function, name)}
    for stmt in (n for n in ast.walk(function) if isinstance(n, ast.If)):
        for each in names:
            leaves = (
                len(stmt.body) == 1
                and isinstance(stmt.body[0], ast.Return | ast.Continue)
                and not getattr(stmt.body[0], "value", None)
            )
            if leaves and not stmt.orelse and asks(stmt.test, each, good=False):
                yield hit("SS505", stmt, f"{each} is silently dropped when it is non-finite", snippet=SAY_SO)
            elif not stmt.orelse and asks(stmt.test, each, good=True) and _only_adds(stmt.body, each):
                yield hit("SS505", stmt, f"{each} is silently left out when it is non-finite", snippet=SAY_SO)
            elif not stmt.orelse and asks(stmt.test, each, good=False) and _replaces(stmt.body, each):
                yield hit("SS505", stmt, f"{each} is silently replaced when it is non-finite", snippet=SAY_SO)
    for node in ast.walk(function):
        for each in names if isinstance(node, ast.IfExp) else ():
            if isinstance(node, ast.IfExp) and _chooses(node, each):
                yield hit("SS505", node, f"{each} is silently replaced when it is non-finite", snippet=SAY_SO)


def _listed(function: Function, name: str) -> Iterator[str]:
    """`v` of `for k, v in scalars.items():`, also in a comprehension."""
    loops = [(n.target, n.iter) for n in ast.walk(function) if isinstance(n, ast.For | ast.comprehension)]
    for target, over in loops:
        owner = over.func.value if isinstance(over, ast.Call) and isinstance(over.func, ast.Attribute) else over
        if name_of(owner) == name:
            yield name_of(target.elts[-1] if isinstance(target, ast.Tuple) else target)


def _replaces(body: list[ast.stmt], name: str) -> bool:
    """`value = 0.0`, or the last good one."""
    stored = [t for s in body if isinstance(s, ast.Assign) for t in s.targets]
    return len(body) == len(stored) == 1 and name_of(stored[0]) == name


def _chooses(node: ast.IfExp, name: str) -> bool:
    """`v if math.isfinite(v) else 0.0`."""
    good, bad = asks(node.test, name, good=True), asks(node.test, name, good=False)
    kept, other = (node.body, node.orelse) if good else (node.orelse, node.body)
    plain = isinstance(other, ast.Constant | ast.Attribute | ast.Name | ast.Subscript | ast.Call)
    return (good or bad) and plain and name_of(cut_value(kept)) == name and name_of(other) != name


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


def _only_adds(body: list[ast.stmt], name: str) -> bool:
    """The loss is added up, listed or logged here and nothing else is done."""
    for stmt in body:
        adds = isinstance(stmt, ast.AugAssign)
        call = stmt.value if isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Call) else None
        lists = call is not None and isinstance(call.func, ast.Attribute) and call.func.attr in ("append", "update")
        if not adds and not lists:
            return False
    return any(name in {name_of(n) for n in ast.walk(stmt)} for stmt in body)


def left_out_of_means(context: Context) -> Iterator[Hit]:
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
                yield hit("SS505", call, f"{leaf} leaves the NaN losses in {held} out", snippet=SAY_SO)
    for node in script.nodes:
        if isinstance(node, ast.ListComp | ast.GeneratorExp) and len(node.generators) == 1:
            part = node.generators[0]
            held, each = name_of(part.iter), name_of(part.target)
            if (script.scope_of(node), held) in listed and part.ifs and all(asks(t, each, good=True) for t in part.ifs):
                yield hit("SS505", node, f"the NaN losses in {held} are left out", snippet=SAY_SO)
