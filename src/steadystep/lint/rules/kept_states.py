"""SS306 on `self`: a recurrent state that a network or a learner keeps from batch to batch, with its graph."""

import ast
import re
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.names import last, name_of, path_of
from steadystep.lint.networks import is_model_call, is_module_class
from steadystep.lint.report import Hit
from steadystep.lint.script import Script
from steadystep.lint.targets import target_of

STATE_NAMES = re.compile(r"^(h|hx|cx|hid|hn|hc)\d*$|hidden|(^|_)states?(_|$)|^memor(y|ies)$|^mems?$|^carry$", re.I)
"""Names of what a recurrent network hands on."""

_CUTS = re.compile(r"detach|\.data\b|repack|clone|no_grad|truncat|stop_grad", re.I)


def kept_on_self(context: Context) -> Iterator[Hit]:
    """`y, self.h = self.rnn(x, self.h)` in a class that is trained, with `self.h` neither cut nor begun anew."""
    script = context.script
    if not any(not e.no_grad and e.loops for e in context.events("backward")):
        return
    for owner in script.classes.values():
        if not _is_trained(context, owner) or _forward_cuts(script):
            continue
        for stmt in (n for n in ast.walk(owner) if isinstance(n, ast.Assign)):
            kept = _carried(stmt)
            function = script.scope_of(stmt)
            if not kept or function is None or function.name == "__init__" or _is_renewed(context, owner, stmt, kept):
                continue
            if _is_cut_somewhere(script, kept):
                continue
            if _is_within(script, stmt) or any("no_grad" in ast.unparse(d) for d in function.decorator_list):
                continue
            message = f"{kept} carries the graph of every earlier batch into this one"
            yield hit("SS306", stmt, message, snippet=f"{kept} = {kept}.detach()   # before each batch")
            break


def _is_cut_somewhere(script: Script, kept: str) -> bool:
    """A statement that has to do with it and cuts something."""
    field = last(kept)
    for node in script.nodes:
        if isinstance(node, ast.Assign | ast.Expr | ast.AugAssign | ast.AnnAssign | ast.Return | ast.For):
            head = node.iter if isinstance(node, ast.For) else node
            about = any(isinstance(n, ast.Attribute) and n.attr == field for n in ast.walk(head))
            if about and (_CUTS.search(ast.unparse(node)) or _handed_to_a_function(script, head, field)):
                return True
    return False


def _handed_to_a_function(script: Script, node: ast.AST, field: str) -> bool:
    """`self.state = cut(self.state)`: a function that cuts, or one of another file that may."""
    for call in (n for n in ast.walk(node) if isinstance(n, ast.Call)):
        given = [n for a in call.args for n in ast.walk(a) if isinstance(n, ast.Attribute) and n.attr == field]
        if not given or is_model_call(call, script) or name_of(call.func).startswith(("self.", "torch.")):
            continue
        function = target_of(call, script)
        if function is None or _CUTS.search(ast.unparse(function)):
            return True
    return False


def _forward_cuts(script: Script) -> bool:
    """A network that cuts what it is given needs nothing from outside."""
    return script.once("forward cuts", lambda: any(map(_cuts, script.functions.get("forward", ()))))


def _cuts(function: ast.AST) -> bool:
    found = (n for n in ast.walk(function) if isinstance(n, ast.Attribute))
    return any(n.attr in ("detach", "detach_", "data") for n in found)


def _carried(stmt: ast.Assign) -> str:
    """The attribute that goes into a call and comes out of it."""
    if not isinstance(stmt.value, ast.Call):
        return ""
    given = {path_of(n) for a in (*stmt.value.args, *(k.value for k in stmt.value.keywords)) for n in ast.walk(a)}
    stored = {path_of(n) for t in stmt.targets for n in ast.walk(t)}
    both = sorted(n for n in given & stored if n.startswith("self.") and STATE_NAMES.search(last(n)))
    return both[0] if both else ""


def _is_trained(context: Context, owner: ast.ClassDef) -> bool:
    """A backward in the class itself, or a network of which an object is called in a loop that trains."""
    script, inside = context.script, set(ast.walk(owner))
    if any(e.node in inside for e in context.events("backward")):
        return True
    return is_module_class(owner, script) and any(
        name_of(c.func) == owner.name for c in script.calls.get(owner.name, ())
    )


def _is_renewed(context: Context, owner: ast.ClassDef, carrying: ast.stmt, kept: str) -> bool:
    """Begun anew in the loop that trains, by a method that is called there, or from outside."""
    script = context.script
    fresh = [
        s
        for s, v in script.named.get(kept, ())
        if script.class_of(s) is owner and s is not carrying and kept not in {path_of(n) for n in ast.walk(v)}
    ]
    methods = {script.scope_of(s) for s in fresh} - {None}
    here = script.scope_of(carrying)
    if here in methods or any(
        name.endswith(f".{last(kept)}") and not name.startswith("self.") for name in script.named
    ):
        return True
    backward = {e.inner.node for e in context.events("backward") if e.inner is not None}
    for method in methods:
        if method is None or method.name == "__init__":
            continue
        for call in script.calls.get(method.name, ()):
            loops = set(script.loops_of(call))
            if loops & backward or _goes_back_too(script, call):
                return True
    return False


def _goes_back_too(script: Script, call: ast.Call) -> bool:
    """The function that begins anew goes back as well."""
    function = script.scope_of(call)
    return function is not None and any(
        isinstance(n, ast.Attribute) and n.attr == "backward" for n in ast.walk(function)
    )


def _is_within(script: Script, stmt: ast.stmt) -> bool:
    around = [a for a in script.ancestors(stmt) if isinstance(a, ast.With)]
    return any("no_grad" in ast.unparse(i.context_expr) for w in around for i in w.items)


def half_cut(context: Context) -> Iterator[Hit]:
    """`state = (h.detach(), c)`: one half of an LSTM's state is cut and the other is not."""
    if not any(True for _ in context.events("backward")):
        return
    for node in context.script.nodes:
        if (
            not isinstance(node, ast.Assign | ast.Return)
            or not isinstance(node.value, ast.Tuple)
            or len(node.value.elts) != 2
        ):
            continue
        cut = [_is_cut(e) for e in node.value.elts]
        plain = next((e for e, c in zip(node.value.elts, cut, strict=True) if not c), None)
        targets = {last(path_of(t)) for t in node.targets} if isinstance(node, ast.Assign) else {"state"}
        both = _taken_from_one(context.script, node.value.elts, node)
        if sum(cut) == 1 and isinstance(plain, ast.Name) and both and any(STATE_NAMES.search(t) for t in targets if t):
            fixed = context.edit().replace(plain, f"{plain.id}.detach()").diff()
            yield hit("SS306", node, f"{plain.id} carries the graph of every earlier batch into this one", diff=fixed)


def _is_cut(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "detach"


def _taken_from_one(script: Script, parts: list[ast.expr], at: ast.stmt) -> bool:
    """Both are halves of one state: `h, c = state`."""
    names = [
        name_of(p.func.value) if isinstance(p, ast.Call) and isinstance(p.func, ast.Attribute) else name_of(p)
        for p in parts
    ]
    found = [script.reaching(n, at) for n in names if n]
    stmts = {id(f[0]) for f in found if f is not None}
    source = path_of(found[0][1]) if found and found[0] is not None else ""
    return len(found) == 2 and len(stmts) == 1 and bool(STATE_NAMES.search(last(source)))
