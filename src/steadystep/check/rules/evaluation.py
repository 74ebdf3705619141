"""Evaluation: SS401 in training mode, SS402 with a graph, SS404 on training data."""

import ast
import re
from collections.abc import Iterator

from steadystep.check.context import Context, hit
from steadystep.check.hit import Hit
from steadystep.check.names import calls_in, last, name_of
from steadystep.check.roles import is_model_call, is_module_class, makes_module
from steadystep.check.script import Function, Scope, Script
from steadystep.check.walk import is_no_grad

_EVALUATES = re.compile(
    r"^_?(run_)?(val|valid|validate|validation|evaluate|eval|test)(_(model|epoch|loop|one_epoch|loss))?$", re.I
)
_HELD_OUT = re.compile(r"(^|_)(val|valid|validation|eval|test|dev|holdout)(_|$|\d|dl|loader|set|data)", re.I)
_TRAIN = re.compile(r"(^|_)train(ing)?(_|$|dl|loader|set|data)", re.I)
_RANDOM_LAYERS = ("Dropout", "BatchNorm", "dropout", "batch_norm", "InstanceNorm", "DropPath")

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
    forwards = [c for s in loop.body for c in calls_in(s) if is_model_call(c, script)]
    if not forwards or _trains(context, loop) or len(script.loops_of(loop)) > 2:
        return
    over = _names_in(loop.iter)
    quiet = all(_no_grad_around(script, call) for call in forwards)
    if quiet and any(_TRAIN.search(n) for n in over) and not any(_HELD_OUT.search(n) for n in over):
        yield from _on_train(context, loop, over)
    named = scope is not None and bool(_EVALUATES.match(scope.name))
    if not named and not any(_HELD_OUT.search(n) for n in over):
        return
    if scope is not None and _trains(context, scope) and not any(_HELD_OUT.search(n) for n in over):
        return
    mode = _sets_mode(script, scope)
    if quiet and not mode and _callers_set_no_mode(script, scope, set()) and _mode_matters(script, forwards[0]):
        model = name_of(forwards[0].func)
        diff = context.edit().put_before(_outermost(script, loop), f"{model}.eval()").diff()
        yield hit("SS401", loop, f"{model} is evaluated without {model}.eval()", diff=diff, snippet=f"{model}.eval()")
    if mode != "eval" or any(_no_grad_around(script, call) for call in forwards) or _wants_gradients(script, scope):
        return
    if not _called_quietly(script, scope):
        yield hit("SS402", loop, "evaluation without torch.no_grad()", diff=_wrapped(context, loop), snippet=_QUIET)


def _names_in(node: ast.AST) -> set[str]:
    found = {last(name_of(n)) for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute)}
    return found | {str(n.value) for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def _trains(context: Context, node: ast.AST) -> bool:
    inside = set(ast.walk(node))
    return any(e.node in inside for e in context.events("backward", "step", "scaler-step", "guard", "opaque"))


def _no_grad_around(script: Script, node: ast.AST) -> bool:
    withs = [a for a in script.ancestors(node) if isinstance(a, ast.With | ast.AsyncWith)]
    if any(is_no_grad(item.context_expr) for w in withs for item in w.items):
        return True
    scope = script.scope_of(node)
    while scope is not None:
        if any(is_no_grad(d) for d in scope.decorator_list):
            return True
        scope = script.scope_of(scope)
    return any(isinstance(n, ast.Call) and name_of(n.func).endswith("set_grad_enabled") for n in script.nodes)


def _sets_mode(script: Script, scope: Scope) -> str:
    """`eval`, `train` or nothing: what is called in the same function or in one around it."""
    owner: ast.AST = scope if scope is not None else script.tree
    modes = {
        n.func.attr
        for n in ast.walk(owner)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in ("eval", "train")
    }
    if "eval" in modes:
        return "eval"
    if any(
        isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "train" and n.args
        for n in ast.walk(owner)
    ):
        return "train"
    outer = script.scope_of(scope) if scope is not None else None
    return _sets_mode(script, outer) if outer is not None else ""


def _callers_set_no_mode(script: Script, scope: Scope, seen: set[Function]) -> bool:
    """True when every caller is in this file and none of them calls eval()."""
    if scope is None:
        return True
    sites = [c for c in script.calls.get(scope.name, ()) if script.scope_of(c) is not scope]
    if not sites or scope in seen:
        return False
    seen.add(scope)
    callers = {script.scope_of(site) for site in sites}
    for caller in callers:
        if _sets_mode(script, caller) == "eval":
            return False
        called = caller is not None and any(script.scope_of(c) is not caller for c in script.calls.get(caller.name, ()))
        if called and not _callers_set_no_mode(script, caller, seen):
            return False
    return True


def _called_quietly(script: Script, scope: Scope) -> bool:
    return scope is not None and any(_no_grad_around(script, c) for c in script.calls.get(scope.name, ()))


def _wants_gradients(script: Script, scope: Scope) -> bool:
    owner: ast.AST = scope if scope is not None else script.tree
    words = {n.attr for n in ast.walk(owner) if isinstance(n, ast.Attribute)}
    inside = words & {"grad", "requires_grad_", "requires_grad"} if scope is not None else set()
    return bool(inside)


def _mode_matters(script: Script, forward: ast.Call) -> bool:
    """Unless the whole network is in the file and has no layer that behaves differently."""
    values = script.values(name_of(forward.func), forward)
    local = values and all(makes_module(v, script) for v in values)
    if not local or any(is_module_class(c, script) and len(c.bases) > 1 for c in script.classes.values()):
        return True
    return any(word in script.text for word in _RANDOM_LAYERS)


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
