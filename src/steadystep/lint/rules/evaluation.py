"""Evaluation: SS401 in training mode, SS402 with a graph."""

import ast
import re
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.control import is_no_grad
from steadystep.lint.hit import Hit
from steadystep.lint.modules import is_model_call
from steadystep.lint.names import calls_in, looks_like_model, name_of
from steadystep.lint.rules.callers import called_from_elsewhere, run_by_framework
from steadystep.lint.rules.eval_passes import in_order
from steadystep.lint.rules.evaluation_mode import (
    called_quietly,
    callers_set_no_mode,
    evaluated_here,
    mode_matters,
    no_grad_around,
    sets_mode,
    stays_in_eval,
    wants_gradients,
)
from steadystep.lint.rules.passes import HELD_OUT, Loop, Pass, leads_to_one, passes, steps_in, trains
from steadystep.lint.script import Scope, Script
from steadystep.lint.targets import target_of

_EVALUATES = re.compile(
    r"^_?(run_)?(validat\w*|evaluat\w*|eval(_\w+)?|valid(_\w+)?|val(_\w+)?|test(_(model|epoch|loop|loss))?"
    r"|((get|compute|calc)_)?(accuracy|score))$",
    re.I,
)

_DEEPEST = 4


def check(context: Context) -> Iterator[Hit]:
    """Both, in files that train."""
    if not any(True for _ in context.events("step", "scaler-step")):
        return
    told = [found for one in passes(context) for found in _judge(context, one)]
    told += [found for call in context.script.calls.get("eval", ()) for found in _without_a_loop(context, call)]
    yield from told
    yield from (found for found in in_order(context) if found.code not in {t.code for t in told})


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
    quiet = all(is_quiet(script, call) for call in forwards) or _only_measures(script, one, held_out=held_out)
    unset = not mode and _stays_in_training(context, scope) and not _is_still(script, forwards[0])
    if quiet and unset and mode_matters(script, forwards[0]) and not run_by_framework(script, scope):
        model = _model_name(script, forwards[0])
        diff = context.edit().put_before(_outermost(script, one.stmt), f"{model}.eval()").diff()
        message = f"{model} is evaluated without {model}.eval()"
        yield hit("SS401", one.stmt, message, diff=diff, snippet=f"{model}.eval()")
    if mode != "eval" or any(is_quiet(script, call) for call in forwards) or wants_gradients(script, scope, one.node):
        return
    if not called_quietly(script, scope) and not called_from_elsewhere(script, scope, list(forwards), one.node):
        diff = _wrapped(context, one.node) if isinstance(one.node, Loop) else ""
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


def is_quiet(script: Script, call: ast.Call, depth: int = 0) -> bool:
    """Gradients are off around the call, or inside the function that it leads to."""
    if no_grad_around(script, call) or is_model_call(call, script):
        return no_grad_around(script, call)
    function = target_of(call, script)
    if function is None or depth > 3:
        return False
    inside = [c for stmt in function.body for c in calls_in(stmt)]
    runs = [c for c in inside if is_model_call(c, script) or leads_to_one(c, script, depth + 1)]
    return any(is_no_grad(c) for c in inside) or all(is_quiet(script, c, depth + 1) for c in runs)


def _stays_in_training(context: Context, scope: Scope) -> bool:
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


def _wrapped(context: Context, loop: Loop) -> str:
    edit = context.edit().put_before(loop, "with torch.no_grad():")
    for number in range(loop.lineno, (loop.end_lineno or loop.lineno) + 1):
        line = context.script.lines[number - 1]
        if line.strip():
            whole = ast.Name(id="", lineno=number, end_lineno=number, col_offset=0, end_col_offset=0)
            edit.replace(whole, "    ")
    return edit.diff()


_QUIET = """with torch.no_grad():
    for x, y in val_loader: ..."""
