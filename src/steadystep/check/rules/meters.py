"""SS302 through a helper: a loss that is given, with its graph, to an object that adds up or collects what it gets."""

import ast
from collections.abc import Iterator

from steadystep.check.bindings import Function, parameters
from steadystep.check.context import Context, hit
from steadystep.check.events import Event
from steadystep.check.hit import Hit
from steadystep.check.names import name_of
from steadystep.check.rules.loss import under_no_grad
from steadystep.check.script import Script
from steadystep.check.targets import target_of

_FORGETS = ("clear", "pop", "popleft")


def in_a_meter(context: Context, event: Event, name: str, loop: ast.AST) -> Iterator[Hit]:
    """`meter.update(loss)`, for a method of this file that keeps what it is given."""
    script = context.script
    for call in (n for n in ast.walk(loop) if isinstance(n, ast.Call)):
        if script.scope_of(call) is not script.scope_of(event.node) or under_no_grad(script, call):
            continue
        position = next((i for i, a in enumerate(call.args) if isinstance(a, ast.Name) and a.id == name), None)
        function = target_of(call, script) if position is not None else None
        if function is None or position is None or script.class_of(function) is None:
            continue
        names = [p for p in parameters(function) if p != "self"]
        kept = _keeps(function, names[position]) if position < len(names) else ""
        if not kept or _is_cut(script, event, name, call) or _forgets(script, call, function, kept, loop):
            continue
        if _is_trained_on(script, function, kept):
            continue
        diff = context.edit().replace(call.args[position], f"{name}.item()").diff()
        if "stack" in script.calls or "cat" in script.calls:
            diff = context.edit().replace(call.args[position], f"{name}.detach()").diff()
        yield hit("SS302", script.stmt_of(call), f"{ast.unparse(call.func)} keeps {name} with its graph", diff=diff)


def in_training_step(context: Context) -> Iterator[Hit]:
    """`self.losses.append(loss)` in a step that hands the same loss to the framework."""
    script = context.script
    for function in script.functions.get("training_step", ()):
        returned = {name_of(n.value) for n in ast.walk(function) if isinstance(n, ast.Return)} - {""}
        for name in sorted(returned):
            kept = _keeps(function, name, changed=True)
            call = next((c for c in ast.walk(function) if _appends(c, kept, name)), None)
            if kept and isinstance(call, ast.Call) and not _empties(function, kept):
                diff = context.edit().replace(call.args[0], f"{name}.detach()").diff()
                yield hit("SS302", script.stmt_of(call), f"{kept} keeps {name} with its graph", diff=diff)


def _appends(node: ast.AST, kept: str, name: str) -> bool:
    called = isinstance(node, ast.Call) and name_of(node.func) == f"{kept}.append"
    return isinstance(node, ast.Call) and called and [name_of(a) for a in node.args] == [name]


def _keeps(function: Function, name: str, *, changed: bool = False) -> str:
    """The attribute that a parameter is added to or appended to as it is; empty when it is cut or changed first."""
    for node in ast.walk(function):
        if not changed and isinstance(node, ast.Assign) and name in {name_of(t) for t in node.targets}:
            return ""
    for node in ast.walk(function):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and _bare(node.value, name):
            target = node.target.value if isinstance(node.target, ast.Subscript) else node.target
            return _attribute(target)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or len(node.args) != 1:
            continue
        if node.func.attr == "append" and name_of(node.args[0]) == name:
            held = node.func.value
            return _attribute(held.value if isinstance(held, ast.Subscript) else held)
    return ""


def _attribute(node: ast.expr) -> str:
    return name_of(node) if name_of(node).startswith("self.") else ""


def _bare(node: ast.expr, name: str) -> bool:
    """The value itself in a sum or a product."""
    if isinstance(node, ast.BinOp):
        return _bare(node.left, name) or _bare(node.right, name)
    if isinstance(node, ast.List):
        return any(_bare(part, name) for part in node.elts)
    return name_of(node) == name


def _is_cut(script: Script, event: Event, name: str, call: ast.Call) -> bool:
    found = script.reaching(name, call)
    return found is not None and found[0].lineno > event.line


def _forgets(script: Script, call: ast.Call, function: Function, kept: str, loop: ast.AST) -> bool:
    """Empties itself as it goes, has a limit, or is emptied in the same loop."""
    owner = script.class_of(function)
    values = [v for s, v in script.named.get(kept, ()) if script.class_of(s) is owner]
    if any(isinstance(v, ast.Call) and v.keywords for v in values):
        return True
    if _empties(function, kept):
        return True
    mine = name_of(call.func).rpartition(".")[0]
    others = [c for c in ast.walk(loop) if isinstance(c, ast.Call) and c is not call]
    reached = [target_of(c, script) for c in others if name_of(c.func).rpartition(".")[0] == mine]
    return any(f is not None and _empties(f, kept) for f in reached)


def _empties(function: Function, kept: str) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and node.attr in _FORGETS and name_of(node.value) == kept:
            return True
        if isinstance(node, ast.Assign) and kept in {name_of(t) for target in node.targets for t in ast.walk(target)}:
            return True
        if isinstance(node, ast.Delete):
            return True
        called = name_of(node.func) if isinstance(node, ast.Call) else ""
        if called in ("self.reset", "self.clear", "self.__init__"):
            return True
    return False


def _is_trained_on(script: Script, function: Function, kept: str) -> bool:
    """What is kept is gone back through later, so its graph is wanted."""
    owner = script.class_of(function)
    field = kept.partition(".")[2]
    if any(field in ast.unparse(call.func) for call in script.calls.get("backward", ())):
        return True
    return owner is not None and any(isinstance(n, ast.Attribute) and n.attr == "backward" for n in ast.walk(owner))
