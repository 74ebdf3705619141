"""Evaluation: SS401 in training mode, SS402 with a graph, SS404 on training data."""

import ast
import re
from collections.abc import Iterator

from steadystep.check.context import Context, hit
from steadystep.check.control import is_no_grad
from steadystep.check.hit import Hit
from steadystep.check.names import calls_in, last, looks_like_model, name_of
from steadystep.check.roles import is_model_call
from steadystep.check.rules.evaluation_mode import (
    called_quietly,
    callers_set_no_mode,
    mode_matters,
    no_grad_around,
    sets_mode,
    wants_gradients,
)
from steadystep.check.script import Scope, Script

_EVALUATES = re.compile(
    r"^_?(run_)?(validat\w*|evaluat\w*|eval(_\w+)?|valid(_\w+)?|val(_\w+)?|test(_(model|epoch|loop|loss))?"
    r"|((get|compute|calc)_)?(accuracy|score))$",
    re.I,
)
_HELD_OUT = re.compile(r"(^|_)(val|valid|validation|eval|test|dev|holdout)(_|$|\d|dl|loader|set|data)", re.I)
_TRAIN = re.compile(r"(^|_)train(ing)?(_|$|dl|loader|set|data)", re.I)

Loop = ast.For | ast.AsyncFor


def check(context: Context) -> Iterator[Hit]:
    """All three."""
    if not any(True for _ in context.events("step", "scaler-step")):
        return
    for node in context.script.nodes:
        if isinstance(node, ast.For | ast.AsyncFor):
            yield from _loop(context, node)
    yield from _on_train_by_call(context)


def _loop(context: Context, loop: Loop) -> Iterator[Hit]:
    script, scope = context.script, context.script.scope_of(loop)
    forwards = [c for s in loop.body for c in calls_in(s) if is_model_call(c, script) or _leads_to_one(c, script)]
    if not forwards or _trains(context, loop) or len(script.loops_of(loop)) > 2:
        return
    over = _names_in(loop.iter)
    quiet = all(_is_quiet(script, call) for call in forwards)
    if quiet and any(_TRAIN.search(n) for n in over) and not any(_HELD_OUT.search(n) for n in over):
        yield from _on_train(context, loop, over)
    named = scope is not None and bool(_EVALUATES.match(scope.name))
    if not named and not any(_HELD_OUT.search(n) for n in over):
        return
    if scope is not None and _trains(context, scope) and not any(_HELD_OUT.search(n) for n in over):
        return
    mode = sets_mode(script, scope)
    if quiet and not mode and _stays_in_training(context, scope) and mode_matters(script, forwards[0]):
        model = _model_name(script, forwards[0])
        diff = context.edit().put_before(_outermost(script, loop), f"{model}.eval()").diff()
        yield hit("SS401", loop, f"{model} is evaluated without {model}.eval()", diff=diff, snippet=f"{model}.eval()")
    if mode != "eval" or any(_is_quiet(script, call) for call in forwards) or wants_gradients(script, scope):
        return
    if not called_quietly(script, scope):
        yield hit("SS402", loop, "evaluation without torch.no_grad()", diff=_wrapped(context, loop), snippet=_QUIET)


def _names_in(node: ast.AST) -> set[str]:
    found = {last(name_of(n)) for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute)}
    return found | {str(n.value) for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def _trains(context: Context, node: ast.AST) -> bool:
    inside = set(ast.walk(node))
    steps = context.events("backward", "step", "scaler-step", "guard", "opaque")
    return any(e.node in inside for e in steps if e.kind != "opaque" or e.owner)


def _is_quiet(script: Script, call: ast.Call) -> bool:
    """Gradients are off around the call, or inside the function that it leads to."""
    if no_grad_around(script, call) or is_model_call(call, script):
        return no_grad_around(script, call)
    body = script.functions[last(name_of(call.func))][0].body
    inside = [c for stmt in body for c in calls_in(stmt)]
    return any(is_no_grad(c) for c in inside) or all(
        no_grad_around(script, c) for c in inside if is_model_call(c, script)
    )


def _leads_to_one(call: ast.Call, script: Script) -> bool:
    """A call into this file that runs a network and does nothing else of interest."""
    found = script.functions.get(last(name_of(call.func)), [])
    if len(found) != 1 or name_of(call.func).rpartition(".")[0] not in ("", "self"):
        return False
    calls = [c for stmt in found[0].body for c in calls_in(stmt)]
    busy = any(isinstance(c.func, ast.Attribute) and c.func.attr in ("backward", "eval", "train") for c in calls)
    return not busy and any(is_model_call(c, script) for c in calls)


def _stays_in_training(context: Context, scope: Scope) -> bool:
    """The function trains as well, or nobody who calls it has switched the mode."""
    return (scope is not None and _trains(context, scope)) or callers_set_no_mode(context.script, scope, set())


def _model_name(script: Script, forward: ast.Call) -> str:
    if is_model_call(forward, script):
        return name_of(forward.func)
    given = [name_of(a) for a in forward.args if looks_like_model(name_of(a))]
    return given[0] if given else "self.model" if name_of(forward.func).startswith("self.") else "model"


def _outermost(script: Script, loop: Loop) -> ast.stmt:
    """The statement to put eval() in front of: the `with` around the loop, if there is one."""
    parent = script.parents[loop]
    return parent if isinstance(parent, ast.With | ast.AsyncWith) else loop


def _wrapped(context: Context, loop: Loop) -> str:
    edit = context.edit().put_before(loop, "with torch.no_grad():")
    for number in range(loop.lineno, (loop.end_lineno or loop.lineno) + 1):
        line = context.script.lines[number - 1]
        if line.strip():
            whole = ast.Name(id="", lineno=number, end_lineno=number, col_offset=0, end_col_offset=0)
            edit.replace(whole, "    ")
    return edit.diff()


def _on_train(context: Context, loop: Loop, over: set[str]) -> Iterator[Hit]:
    scored = {last(name_of(n.target)) for n in ast.walk(loop) if isinstance(n, ast.AugAssign)}
    scored |= {
        last(name_of(n.func.value))
        for n in ast.walk(loop)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in ("append", "update")
    }
    if any(re.match(r"(val|valid|validation|test|dev)(_|$)", name, re.I) for name in scored):
        source = next(n for n in sorted(over) if _TRAIN.search(n))
        yield hit("SS404", loop, f"a validation score is computed over {source}", snippet="for x, y in val_loader: ...")


def _on_train_by_call(context: Context) -> Iterator[Hit]:
    for node in context.script.nodes:
        if not isinstance(node, ast.Assign) or len(node.targets) != 1 or not isinstance(node.value, ast.Call):
            continue
        call, target = node.value, node.targets[0]
        names = [name_of(t) for t in (target.elts if isinstance(target, ast.Tuple) else [target])]
        held_out = all(re.match(r"(val|valid|validation|test|dev)(_|$)", last(n), re.I) for n in names)
        if not held_out or not re.search(r"eval|valid|test|score|accuracy", last(name_of(call.func)), re.I):
            continue
        given = [last(name_of(a)) for a in (*call.args, *(k.value for k in call.keywords))]
        trained = [n for n in given if _TRAIN.search(n)]
        if trained and not any(_HELD_OUT.search(n) for n in given):
            yield hit(
                "SS404", node, f"{names[0]} is measured on {trained[0]}", snippet=f"{names[0]} = ...(model, val_loader)"
            )


_QUIET = """with torch.no_grad():
    for x, y in val_loader: ..."""
