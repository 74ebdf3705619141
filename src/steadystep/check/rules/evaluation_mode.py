"""In which mode a function evaluates: what it sets itself, what its callers set, and whether gradients are on."""

import ast

from steadystep.check.control import is_no_grad
from steadystep.check.names import last, name_of
from steadystep.check.roles import is_module_class, makes_module
from steadystep.check.script import Function, Scope, Script
from steadystep.check.targets import target_of

_RANDOM_LAYERS = ("Dropout", "BatchNorm", "dropout", "batch_norm", "InstanceNorm", "DropPath")


def no_grad_around(script: Script, node: ast.AST) -> bool:
    """Whether gradients are off at a node: a `with`, a decorator, or a switch anywhere in the file."""
    withs = [a for a in script.ancestors(node) if isinstance(a, ast.With | ast.AsyncWith)]
    if any(is_no_grad(item.context_expr) for w in withs for item in w.items):
        return True
    scope = script.scope_of(node)
    while scope is not None:
        if any(is_no_grad(d) for d in scope.decorator_list):
            return True
        scope = script.scope_of(scope)
    return bool(script.calls.get("set_grad_enabled"))


def sets_mode(script: Script, scope: Scope) -> str:
    """`eval`, `train` or nothing: what is called in the same function or in one around it."""
    owner: ast.AST = scope if scope is not None else script.tree
    called = [n for n in ast.walk(owner) if isinstance(n, ast.Call)]
    modes = {n.func.attr for n in called if isinstance(n.func, ast.Attribute) and n.func.attr in ("eval", "train")}
    if "eval" in modes:
        return "eval"
    if scope is not None and any(_switches(script, call) for call in called):
        return "train"
    if any(
        isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "train" and n.args
        for n in ast.walk(owner)
    ):
        return "train"
    outer = script.scope_of(scope) if scope is not None else None
    return sets_mode(script, outer) if outer is not None else ""


def _switches(script: Script, call: ast.Call) -> bool:
    """A call of a function in this file that sets the mode of what it is given, or of all: `self.mode(False)`."""
    function = target_of(call, script)
    words = {n.attr for n in ast.walk(function) if isinstance(n, ast.Attribute)} if function is not None else set()
    return bool(words & {"eval", "train"}) and not words & {"backward", "step"}


def evaluated_here(script: Script, scope: Scope, forward: ast.Call) -> bool:
    """`model.eval()` and `model(x)` in one function, of one that a function of this file, or the loop, trains."""
    called = name_of(forward.func)
    switched = {
        name_of(n.func.value)
        for n in ast.walk(scope or script.tree)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "eval"
    }
    trained = {
        last(name_of(c.func.value)) for c in script.calls.get("parameters", ()) if isinstance(c.func, ast.Attribute)
    }
    return called in switched and last(called) in trained


def callers_set_no_mode(script: Script, scope: Scope, seen: set[Function]) -> bool:
    """True when every caller is in this file and none of them calls eval()."""
    if scope is None:
        return True
    sites = [c for c in script.calls.get(scope.name, ()) if script.scope_of(c) is not scope]
    if not sites or scope in seen:
        return False
    seen.add(scope)
    callers = {script.scope_of(site) for site in sites}
    for caller in callers:
        if sets_mode(script, caller) == "eval":
            return False
        called = caller is not None and any(script.scope_of(c) is not caller for c in script.calls.get(caller.name, ()))
        if called and not callers_set_no_mode(script, caller, seen):
            return False
    return True


def called_quietly(script: Script, scope: Scope) -> bool:
    """Whether a caller has switched gradients off."""
    return scope is not None and any(no_grad_around(script, c) for c in script.calls.get(scope.name, ()))


def wants_gradients(script: Script, scope: Scope) -> bool:
    """Whether a function works with gradients itself, as an attack or a penalty does."""
    owner: ast.AST = scope if scope is not None else script.tree
    words = {n.attr for n in ast.walk(owner) if isinstance(n, ast.Attribute)}
    inside = words & {"grad", "requires_grad_", "requires_grad"} if scope is not None else set()
    return bool(inside)


def mode_matters(script: Script, forward: ast.Call) -> bool:
    """Unless the whole network is in the file and has no layer that behaves differently."""
    values = script.values(name_of(forward.func), forward)
    local = values and all(makes_module(v, script) for v in values)
    if not local or any(is_module_class(c, script) and len(c.bases) > 1 for c in script.classes.values()):
        return True
    return any(word in script.text for word in _RANDOM_LAYERS)
