"""Evaluation: SS401 in training mode, SS402 with a graph."""

import ast
import re
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.control import is_no_grad
from steadystep.lint.names import calls_in, looks_like_model, name_of
from steadystep.lint.networks import Network, is_model_call, related
from steadystep.lint.report import Hit
from steadystep.lint.rules.evaluation_mode import (
    called_quietly,
    callers_set_no_mode,
    evaluated_here,
    is_before_no_grad,
    may_switch,
    mode_matters,
    no_grad_around,
    sets_mode,
    stays_in_eval,
    wants_gradients,
)
from steadystep.lint.rules.passes import (
    HELD_OUT,
    ForLoop,
    MeasuredPass,
    Pass,
    called_from_elsewhere,
    leads_to_one,
    measured_passes,
    passes,
    run_by_framework,
    steps_in,
    trains,
)
from steadystep.lint.script import Script, ScriptScope
from steadystep.lint.targets import target_of

_EVALUATES = re.compile(
    r"^_?(run_)?(validat\w*|evaluat\w*|eval(_\w+)?|valid(_\w+)?|val(_\w+)?|test(_(model|epoch|loop|loss))?"
    r"|((get|compute|calc)_)?(accuracy|score))$",
    re.I,
)
_DEEPEST = 4


def modes_in_order(context: Context) -> Iterator[Hit]:
    """One of each kind at most: the others have the same cause."""
    seen: set[str] = set()
    for one in measured_passes(context):
        for found in (*_in_training_mode(context, one), *_with_graph(context, one)):
            if found.code not in seen:
                seen.add(found.code)
                yield found


def _in_training_mode(context: Context, one: MeasuredPass) -> Iterator[Hit]:
    """The last that was said is train(), and then numbers are read over held-out data."""
    script, first = context.script, one.forwards[0]
    mode = one.mode()
    if mode is None or mode.kind != "train" or not (one.twin or (one.held_out and one.quiet)):
        return
    between = one.root[one.root.index(mode) : one.root.index(first)]
    me = Network(first.local, first.node)
    others = [Network(e.local, e.node) for e in between if e.kind in ("eval", "mode")]
    if any(related(script, me, other) is not False for other in others) or not _reads_numbers(script_node(one)):
        return
    if (
        not isinstance(first.node, ast.Call)
        or not mode_matters(script, first.node)
        or stays_in_eval(script, first.node)
    ):
        return
    scope = script.scope_of(first.node)
    around: ast.AST = scope if scope is not None else one.loop.node
    if may_switch(script, around) or _switched_by_callers(context, one) or run_by_framework(script, scope):
        return
    message = f"{first.local} is evaluated in training mode: the last call was {mode.local}.train()"
    yield hit("SS401", mode.node if one.twin else one.loop.node, message, snippet=f"{mode.local}.train(training)")


def _switched_by_callers(context: Context, one: MeasuredPass) -> bool:
    """Something on the way here sets the mode in a way that is not seen."""
    return any(may_switch(context.script, context.script.stmt_of(site)) for site in one.loop.sites)


def _with_graph(context: Context, one: MeasuredPass) -> Iterator[Hit]:
    """Eval mode was set, or the same loop trains elsewhere, and nothing switches gradients off."""
    script, mode = context.script, one.mode()
    calls = [e.node for e in one.forwards]
    if any(e.no_grad or no_grad_around(script, e.node) for e in one.forwards):
        return
    in_eval = mode is not None and mode.kind == "eval" and _is_trained(context, one)
    if not in_eval and not (one.twin and (mode is None or mode.kind != "train" or one.held_out)):
        return
    scope = script.scope_of(one.loop.node)
    if wants_gradients(script, scope, one.loop.node) or any(
        wants_gradients(script, script.scope_of(c), c) for c in calls
    ):
        return
    if "autograd" in script.text and in_eval:
        return
    runs = [c for c in calls if isinstance(c, ast.Call)]
    if called_from_elsewhere(script, scope, runs, one.loop.node):
        return
    if any(no_grad_around(script, site) for site in one.loop.sites) or not _reads_numbers(scope or script_node(one)):
        return
    yield hit("SS402", one.loop.node, "evaluation without torch.no_grad()", snippet=_QUIET_WITH_FLAG)


def _is_trained(context: Context, one: MeasuredPass) -> bool:
    """The network is one that train() is called on as well, so it is not a frozen one."""
    owners = {e.owner for e in context.events("train", "mode")}
    return any(f"{e.owner}.".startswith((f"{o}.", f"{o}[")) for e in one.forwards for o in owners)


def script_node(one: MeasuredPass) -> ast.AST:
    """The loop in the tree."""
    return one.loop.node


def _reads_numbers(node: ast.AST) -> bool:
    words = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
    return bool(words & {"item", "argmax", "tolist", "numpy", "topk", "indices"})


_QUIET_WITH_FLAG = """with torch.no_grad():   # with a flag: torch.set_grad_enabled(training)
    for x, y in loader: ..."""


def check(context: Context) -> Iterator[Hit]:
    """Both, in files that train."""
    if not any(True for _ in context.events("step", "scaler-step")):
        return
    told = [found for one in passes(context) for found in _judge(context, one)]
    told += [found for call in context.script.calls.get("eval", ()) for found in _without_a_loop(context, call)]
    told += [found for found in modes_in_order(context) if found.code not in {t.code for t in told}]
    old = is_before_no_grad(context.script)
    yield from (found for found in told if found.code != "SS402" or not old)


def _judge(context: Context, one: Pass) -> Iterator[Hit]:
    script, scope, forwards = context.script, one.scope, one.forwards
    held_out = any(HELD_OUT.search(n) for n in one.over)
    named = scope is not None and bool(_EVALUATES.match(scope.name))
    mode = sets_mode(script, scope)
    own = mode == "eval" and scope is not None and evaluated_here(script, scope, forwards[0])
    if not named and not held_out and not own:
        return
    if scope is not None and trains(context, scope) and not held_out:
        return
    quiet = all(evaluates_quietly(script, call) for call in forwards) or _only_measures(script, one, held_out=held_out)
    unset = not mode and _stays_in_training(context, scope) and not _is_still(script, forwards[0])
    if quiet and unset and mode_matters(script, forwards[0]) and not run_by_framework(script, scope):
        model = _model_name(script, forwards[0])
        diff = context.edit().put_before(_outermost(script, one.stmt), f"{model}.eval()").diff()
        message = f"{model} is evaluated without {model}.eval()"
        yield hit("SS401", one.stmt, message, diff=diff, snippet=f"{model}.eval()")
    if (
        mode != "eval"
        or any(evaluates_quietly(script, call) for call in forwards)
        or wants_gradients(script, scope, one.node)
    ):
        return
    if not called_quietly(script, scope) and not called_from_elsewhere(script, scope, list(forwards), one.node):
        diff = _wrapped(context, one.node) if isinstance(one.node, ForLoop) else ""
        yield hit("SS402", one.stmt, "evaluation without torch.no_grad()", diff=diff, snippet=_QUIET)


def _without_a_loop(context: Context, switch: ast.Call) -> Iterator[Hit]:
    """`model.eval()`, `out = model(x)`, a score read from it: all of the data in one batch."""
    script, stmt, scope = context.script, context.script.stmt_of(switch), context.script.scope_of(switch)
    model = name_of(switch.func.value) if isinstance(switch.func, ast.Attribute) else ""
    block = getattr(script.parents.get(stmt), "body", [])
    if not model or stmt not in block or wants_gradients(script, scope, stmt) or called_quietly(script, scope):
        return
    run: ast.stmt | None = None
    for later in block[block.index(stmt) + 1 :]:
        words = {n.attr for n in ast.walk(later) if isinstance(n, ast.Attribute)}
        if not isinstance(later, ast.Assign | ast.Expr | ast.AugAssign | ast.Return) or words & {
            "train",
            "backward",
            "step",
        }:
            return
        calls = [c for c in calls_in(later) if name_of(c.func) == model and not no_grad_around(script, c)]
        if calls and run is None and evaluated_here(script, scope, calls[0]):
            run = later
        if run is not None and words & {"item", "argmax"}:
            yield hit(
                "SS402",
                run,
                "evaluation without torch.no_grad()",
                snippet=f"with torch.no_grad():\n    {ast.unparse(run)}",
            )
            return


def _is_still(script: Script, forward: ast.Call) -> bool:
    """What runs, here or in the function that is called, is in eval mode for good."""
    if stays_in_eval(script, forward):
        return True
    function = target_of(forward, script)
    inside = [c for stmt in function.body for c in calls_in(stmt)] if function is not None else []
    runs = [c for c in inside if is_model_call(c, script)]
    return bool(runs) and all(stays_in_eval(script, c) for c in runs)


def _only_measures(script: Script, one: Pass, *, held_out: bool) -> bool:
    """Numbers are read over held-out data, with neither eval() nor no_grad() in sight."""
    words = {n.attr for n in ast.walk(one.stmt) if isinstance(n, ast.Attribute)}
    return (
        held_out
        and bool(words & {"item", "argmax", "tolist", "numpy"})
        and not wants_gradients(script, one.scope, one.node)
    )


def evaluates_quietly(script: Script, call: ast.Call, depth: int = 0) -> bool:
    """Gradients are off around the call, or inside the function that it leads to."""
    if no_grad_around(script, call) or is_model_call(call, script):
        return no_grad_around(script, call)
    function = target_of(call, script)
    if function is None or depth > 3:
        return False
    inside = [c for stmt in function.body for c in calls_in(stmt)]
    runs = [c for c in inside if is_model_call(c, script) or leads_to_one(c, script, depth + 1)]
    return any(is_no_grad(c) for c in inside) or all(evaluates_quietly(script, c, depth + 1) for c in runs)


def _stays_in_training(context: Context, scope: ScriptScope) -> bool:
    """The function trains as well, or nobody who calls it has switched the mode."""
    return (scope is not None and steps_in(context, scope)) or callers_set_no_mode(context.script, scope, set())


def _model_name(script: Script, forward: ast.Call, depth: int = 0) -> str:
    if is_model_call(forward, script):
        return name_of(forward.func)
    given = [name_of(a) for a in forward.args if looks_like_model(name_of(a))]
    if given:
        return given[0]
    function = target_of(forward, script)
    inside = [c for stmt in function.body for c in calls_in(stmt)] if function is not None else []
    runs = [c for c in inside if is_model_call(c, script) or leads_to_one(c, script)]
    if name_of(forward.func).startswith("self.") and runs and depth < _DEEPEST:
        return _model_name(script, runs[0], depth + 1)
    return "self.model" if name_of(forward.func).startswith("self.") else "model"


def _outermost(script: Script, stmt: ast.stmt) -> ast.stmt:
    """The statement to put eval() in front of: the `with` around the loop, if there is one."""
    parent = script.parents[stmt]
    return parent if isinstance(parent, ast.With | ast.AsyncWith) else stmt


def _wrapped(context: Context, loop: ForLoop) -> str:
    edit = context.edit().put_before(loop, "with torch.no_grad():")
    for number in range(loop.lineno, (loop.end_lineno or loop.lineno) + 1):
        line = context.script.lines[number - 1]
        if line.strip():
            whole = ast.Name(id="", lineno=number, end_lineno=number, col_offset=0, end_col_offset=0)
            edit.replace(whole, "    ")
    return edit.diff()


_QUIET = """with torch.no_grad():
    for x, y in val_loader: ..."""
