"""SS302 in a list, a table or an attribute: a loss that is kept with its graph, here or in a method."""

import ast
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.events import Event
from steadystep.lint.names import Function, looks_like_model, looks_like_optimizer, name_of, path_of
from steadystep.lint.numbers import number_at
from steadystep.lint.report import Hit
from steadystep.lint.rules.loss import cut_at, under_no_grad
from steadystep.lint.rules.trained import goes_back, is_loss
from steadystep.lint.script import Script, ScriptScope

_FEW = 20  # graphs whose buffers are freed: so many weigh nothing
FORGETS = ("clear", "pop", "popleft")
"""Methods that let go of what was kept."""


def listed(context: Context, event: Event, names: list[str], loop: ast.For | ast.AsyncFor | ast.While) -> Iterator[Hit]:
    """For an ordinary list that only grows.

    A loss that is collected for a joint backward is not gone back through on its own, so it never comes here.
    """
    script, scope = context.script, context.script.scope_of(event.node)
    if not _steps_in(context, event) or _over_few(script, loop) or _retains(event):
        return
    for call in script.calls.get("append", ()):
        if script.scope_of(call) is not scope or loop not in script.ancestors(call) or len(call.args) != 1:
            continue
        held = held_by(call)
        kept = _kept(script, call.args[0], names)
        if kept is None or not _only_grows(script, held, call, loop, scope):
            continue
        if (
            goes_back(script, held, scope)
            or under_no_grad(script, call)
            or is_cut_before(script, event, path_of(kept), call)
        ):
            continue
        name = path_of(kept)
        diff = context.edit().replace(kept, f"{name}.detach()").diff()
        yield hit("SS302", script.stmt_of(call), f"{held} keeps {name} with its graph", diff=diff)


def held_by(call: ast.Call) -> str:
    """The list of `losses.append(x)`, of `history[k].append(x)` and of `history.setdefault(k, []).append(x)`."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    if isinstance(owner, ast.Call) and isinstance(owner.func, ast.Attribute) and owner.func.attr == "setdefault":
        owner = owner.func.value
    if isinstance(owner, ast.Subscript) and not path_of(owner):
        owner = owner.value
    return path_of(owner)


def grows(script: Script, value: ast.expr) -> bool:
    """An empty list, or a table of such."""
    if isinstance(value, ast.List):
        return not value.elts
    if isinstance(value, ast.Dict):
        return all(grows(script, v) for v in value.values)
    if isinstance(value, ast.DictComp):
        return grows(script, value.value)
    made = name_of(value.func) if isinstance(value, ast.Call) else ""
    return isinstance(value, ast.Call) and (
        (made.endswith("defaultdict") and [name_of(a) for a in value.args] == ["list"])
        or (made in ("list", "dict") and not value.args)
    )


def is_cut_before(script: Script, event: Event, name: str, node: ast.AST) -> bool:
    """Between backward and here the name was given to a number."""
    found = script.reaching(name, node)
    if found is None or found[0].lineno <= event.line:
        return False
    value = found[1].value if isinstance(found[1], ast.Subscript) else found[1]  # `loss.data[0]`
    return cut_at(value) is not None


def _kept(script: Script, given: ast.expr, names: list[str]) -> ast.expr | None:
    """The loss itself, alone or as a part of a record that is written out."""
    parts = given.values if isinstance(given, ast.Dict) else given.elts if isinstance(given, ast.Tuple) else [given]
    return next((part for part in parts if is_loss(script, part, names)), None)


def _steps_in(context: Context, event: Event) -> bool:
    """An update in every pass: a loop over the parts of one batch has few."""
    steps = context.script.once("loops that step", lambda: {e.inner for e in context.events("step", "scaler-step")})
    return event.inner is not None and event.inner in steps


def _over_few(script: Script, loop: ast.For | ast.AsyncFor | ast.While) -> bool:
    """A loop over networks or optimizers is a short one, and so is one of a few passes."""
    if isinstance(loop, ast.While):
        return False
    passes = loop.iter.args if isinstance(loop.iter, ast.Call) and name_of(loop.iter.func) == "range" else []
    known = number_at(passes[0], script, loop) if len(passes) == 1 else None
    names = [name_of(n) for part in (loop.iter, loop.target) for n in ast.walk(part)]
    return (known is not None and known <= _FEW) or any(
        looks_like_model(n) or looks_like_optimizer(n) for n in names if n
    )


def _retains(event: Event) -> bool:
    return isinstance(event.node, ast.Call) and any(k.arg == "retain_graph" for k in event.node.keywords)


def _only_grows(script: Script, held: str, call: ast.Call, loop: ast.AST, scope: ScriptScope) -> bool:
    values = script.values(held, call)
    if not values or not all(grows(script, v) for v in values):
        return False
    if any(loop in script.ancestors(s) for s, _ in script.assigned.get((scope, held), ())):
        return False
    for node in ast.walk(loop):
        if isinstance(node, ast.Attribute) and node.attr in ("clear", "pop") and name_of(node.value) == held:
            return False
        if isinstance(node, ast.Delete) and held in {name_of(n) for n in ast.walk(node)}:
            return False
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and name_of(node.value) == held:
            return False
    return True


def keeps(function: Function, name: str, *, changed: bool = False) -> str:
    """The attribute that a parameter is added to or appended to as it is; empty when it is cut or changed first."""
    if not name:
        return ""
    for node in ast.walk(function):
        if not changed and isinstance(node, ast.Assign) and name in {name_of(t) for t in node.targets}:
            return ""
    for loop in (n for n in ast.walk(function) if isinstance(n, ast.For)):
        over = (
            loop.iter.func.value
            if isinstance(loop.iter, ast.Call) and isinstance(loop.iter.func, ast.Attribute)
            else loop.iter
        )
        if name_of(over) == name:  # for k, v in kw.items()
            parts = loop.target.elts if isinstance(loop.target, ast.Tuple) else [loop.target]
            stored = {
                name_of(t) for s in loop.body for n in ast.walk(s) if isinstance(n, ast.Assign) for t in n.targets
            }
            name = name_of(parts[-1]) if name_of(parts[-1]) not in stored else ""
    return next((kept for kept, _ in (kept_in(node, {name}) for node in ast.walk(function)) if kept), "")


def kept_in(node: ast.AST, names: set[str]) -> tuple[str, ast.expr | None]:
    """(attribute, what is kept) of `self.total += x`, `self.total = self.total + x` and `self.all.append(x)`."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        target = node.target.value if isinstance(node.target, ast.Subscript) else node.target
        given = _bare(node.value, names)
        return (_attribute(target), given) if given is not None else ("", None)
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0].value if isinstance(node.targets[0], ast.Subscript) else node.targets[0]
        ways = [node.value.body, node.value.orelse] if isinstance(node.value, ast.IfExp) else [node.value]
        for way in ways:
            own = name_of(target) in {name_of(n) for n in ast.walk(way)} and isinstance(way, ast.BinOp)
            given = _bare(way, names) if own and isinstance(way, ast.BinOp) and isinstance(way.op, ast.Add) else None
            if given is not None:
                return _attribute(target), given
        return "", None
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append"
    if isinstance(node, ast.Call) and called and len(node.args) == 1 and name_of(node.args[0]) in names:
        held = held_by(node)
        return (held if held.startswith("self.") else "", node.args[0])
    return "", None


def _attribute(node: ast.expr) -> str:
    return name_of(node) if name_of(node).startswith("self.") else ""


def _bare(node: ast.expr, names: set[str]) -> ast.expr | None:
    """The value itself in a sum or a product."""
    if isinstance(node, ast.BinOp):
        return _bare(node.left, names) or _bare(node.right, names)
    if isinstance(node, ast.List):
        return next((found for found in (_bare(part, names) for part in node.elts) if found is not None), None)
    return node if name_of(node) in names else None


def empties(function: Function, kept: str) -> bool:
    """Whether a method begins anew with what it keeps."""
    begins = {
        s
        for n in ast.walk(function)
        if isinstance(n, ast.If) and kept in {name_of(p) for p in ast.walk(n.test)} and "None" in ast.unparse(n.test)
        for s in n.body
    }
    for node in ast.walk(function):
        if node in begins:
            continue  # the first value, not a new beginning
        if isinstance(node, ast.Attribute) and node.attr in FORGETS and name_of(node.value) == kept:
            return True
        stored = (
            {name_of(t) for target in node.targets for t in ast.walk(target)} if isinstance(node, ast.Assign) else set()
        )
        if isinstance(node, ast.Assign) and kept in stored and kept not in {name_of(n) for n in ast.walk(node.value)}:
            return True
        if isinstance(node, ast.Delete):
            return True
        called = name_of(node.func) if isinstance(node, ast.Call) else ""
        if called in ("self.reset", "self.clear", "self.__init__"):
            return True
    return False


def in_a_method(context: Context, event: Event, names: list[str]) -> Iterator[Hit]:
    """`self.history.append(loss)` or `self.total += loss` in a method with the backward, called once per batch."""
    script = context.script
    function = script.scope_of(event.node)
    owner = script.parents.get(function) if function is not None else None
    if function is None or not isinstance(owner, ast.ClassDef) or not event.loops:
        return
    for name in names:
        for node in ast.walk(function):
            kept, given = kept_in(node, {name})
            late = given is not None and node.lineno > event.line if isinstance(node, ast.stmt) else False
            if (
                not kept
                or given is None
                or not late
                or _is_bound_again(script, event, name, node)
                or empties(function, kept)
            ):
                continue
            values = [v for s, v in script.named.get(kept, ()) if script.class_of(s) is owner and s is not node]
            plain = values and all(grows(script, v) or isinstance(v, ast.Constant | ast.Call) for v in values)
            begun = [script.scope_of(s) for s, _ in script.named.get(kept, ()) if s is not node]
            others = {f.name for f in begun if f is not None and f is not function and f.name != "__init__"}
            if plain and not others and not _is_trained_on_elsewhere(script, kept):
                diff = context.edit().replace(given, f"{ast.unparse(given)}.detach()").diff()
                stmt = node if isinstance(node, ast.stmt) else script.stmt_of(node)
                yield hit("SS302", stmt, f"{kept} keeps {name} with its graph", diff=diff)


def _is_trained_on_elsewhere(script: Script, kept: str) -> bool:
    field = kept.partition(".")[2]
    return any(field in ast.unparse(call.func) for call in script.calls.get("backward", ())) or any(
        isinstance(n, ast.Attribute) and n.attr in FORGETS and name_of(n.value) == kept for n in script.nodes
    )


def in_training_step(context: Context) -> Iterator[Hit]:
    """`self.losses.append(loss)` in a step that hands the same loss to the framework."""
    script = context.script
    for function in script.functions.get("training_step", ()):
        returned = {name_of(n.value) for n in ast.walk(function) if isinstance(n, ast.Return)} - {""}
        for name in sorted(returned):
            kept = keeps(function, name, changed=True)
            call = next((c for c in ast.walk(function) if _appends(c, kept, name)), None)
            if kept and isinstance(call, ast.Call) and not empties(function, kept):
                diff = context.edit().replace(call.args[0], f"{name}.detach()").diff()
                yield hit("SS302", script.stmt_of(call), f"{kept} keeps {name} with its graph", diff=diff)


def _appends(node: ast.AST, kept: str, name: str) -> bool:
    called = isinstance(node, ast.Call) and name_of(node.func) == f"{kept}.append"
    return isinstance(node, ast.Call) and called and [name_of(a) for a in node.args] == [name]


def _is_bound_again(script: Script, event: Event, name: str, node: ast.AST) -> bool:
    found = script.reaching(name, node)
    return found is not None and found[0].lineno > event.line
