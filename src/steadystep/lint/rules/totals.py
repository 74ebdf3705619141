"""SS302: a loss that is added to a total together with its graph, here, in a meter or by the caller."""

import ast
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.events import Event
from steadystep.lint.names import Function, last, name_of, parameters, path_of
from steadystep.lint.report import Hit
from steadystep.lint.rules.kept_losses import empties, in_a_method, in_training_step, is_cut_before, keeps, listed
from steadystep.lint.rules.loss import under_no_grad
from steadystep.lint.rules.trained import bare, goes_back, is_loss, loss_names, outputs, trained_losses
from steadystep.lint.script import Script, ScriptScope
from steadystep.lint.sources import sources
from steadystep.lint.targets import target_of


def in_a_meter(context: Context, event: Event, names: list[str], loop: ast.AST) -> Iterator[Hit]:
    """`meter.update(loss)`, for a method of this file that keeps what it is given."""
    script = context.script
    for call in (n for n in ast.walk(loop) if isinstance(n, ast.Call)):
        if script.scope_of(call) is not script.scope_of(event.node) or under_no_grad(script, call):
            continue
        function = _kept_by(script, call)
        if function is None or not isinstance(script.parents.get(function), ast.ClassDef):
            continue
        for given, received in _handed_over(script, call, function, names):
            kept = keeps(function, received)
            if not kept or _is_cut(script, event, path_of(given), call) or _forgets(script, call, function, kept, loop):
                continue
            if _is_trained_on(script, function, kept):
                continue
            word = "detach" if "stack" in script.calls or "cat" in script.calls else "item"
            diff = context.edit().replace(given, f"{ast.unparse(given)}.{word}()").diff()
            message = f"{ast.unparse(call.func)} keeps {ast.unparse(given)} with its graph"
            yield hit("SS302", script.stmt_of(call), message, diff=diff, snippet=f"{ast.unparse(given)}.item()")
            break


def _kept_by(script: Script, call: ast.Call) -> Function | None:
    """What a call runs, also where the object is an entry of a table with a key that is not written out."""
    function = target_of(call, script)
    if function is not None:
        return function
    owner = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    if not isinstance(owner, ast.Subscript):
        return None
    made = {last(name_of(v.func)) for v, _ in sources(script, owner) if isinstance(v, ast.Call)} & script.classes.keys()
    if len(made) != 1:
        return None
    wanted = call.func.attr if isinstance(call.func, ast.Attribute) else "__call__"
    body = script.classes[made.pop()].body
    return next((m for m in body if isinstance(m, ast.FunctionDef) and m.name == wanted), None)


def _handed_over(
    script: Script, call: ast.Call, function: Function, names: list[str]
) -> Iterator[tuple[ast.expr, str]]:
    """(what is given, the parameter it becomes) for every loss among the arguments."""
    plain = [p for p in parameters(function) if p not in ("self", "cls")]
    for position, given in enumerate(call.args):
        if is_loss(script, given, names):
            rest = function.args.vararg.arg if function.args.vararg is not None else ""
            yield given, plain[position] if position < len(plain) else rest
    for keyword in call.keywords:
        if keyword.arg and is_loss(script, keyword.value, names):
            spread = function.args.kwarg.arg if function.args.kwarg is not None else ""
            yield keyword.value, keyword.arg if keyword.arg in plain else spread


def _is_cut(script: Script, event: Event, name: str, call: ast.Call) -> bool:
    found = script.reaching(name, call)
    return found is not None and found[0].lineno > event.line


def _forgets(script: Script, call: ast.Call, function: Function, kept: str, loop: ast.AST) -> bool:
    """Empties itself as it goes, has a limit, or is emptied in the same loop."""
    owner = script.class_of(function)
    values = [v for s, v in script.named.get(kept, ()) if script.class_of(s) is owner]
    if any(isinstance(v, ast.Call) and v.keywords for v in values):
        return True
    if empties(function, kept):
        return True
    mine = name_of(call.func).rpartition(".")[0]
    others = [c for c in ast.walk(loop) if isinstance(c, ast.Call) and c is not call]
    reached = [target_of(c, script) for c in others if name_of(c.func).rpartition(".")[0] == mine]
    return any(f is not None and empties(f, kept) for f in reached)


def _is_trained_on(script: Script, function: Function, kept: str) -> bool:
    """What is kept is gone back through later, so its graph is wanted."""
    owner = script.class_of(function)
    field = kept.partition(".")[2]
    if any(field in ast.unparse(call.func) for call in script.calls.get("backward", ())):
        return True
    methods = [m for m in owner.body if isinstance(m, ast.FunctionDef)] if owner is not None else []
    return any(goes_back(script, kept, method) for method in methods)


def handed_back(context: Context) -> Iterator[Hit]:
    """`total += train_step(batch)`, and the same with a name in between, or with one of several."""
    script, losses = context.script, set(trained_losses(context))
    for node in script.nodes:
        if not isinstance(node, ast.AugAssign) or not isinstance(node.op, ast.Add) or not script.loops_of(node):
            continue
        value = node.value
        if (
            isinstance(value, ast.BinOp)
            and isinstance(value.op, ast.Mult | ast.Div)
            and isinstance(value.left, ast.Name)
        ):
            value = value.left  # weighed with the size of the batch
        call, index = _call(script, value, node)
        function = target_of(call, script) if call is not None else None
        total = path_of(node.target)
        if function is None or not _hands_back(script, function, index, losses) or _total_is_trained_on(script, total):
            continue
        diff = context.edit().replace(value, f"{ast.unparse(value)}.item()").diff()
        message = f"{total} sums the result of {function.name} with its graph"
        yield hit("SS302", node, message, diff=diff)


def _call(script: Script, value: ast.expr, at: ast.AST) -> tuple[ast.Call | None, int | None]:
    """The call that a value comes from, and which of the values that it gives back."""
    if isinstance(value, ast.Call):
        return value, None
    found = script.reaching(value.id, at) if isinstance(value, ast.Name) else None
    if found is None or not isinstance(found[0], ast.Assign) or not isinstance(found[1], ast.Call):
        return None, None
    target = found[0].targets[0]
    if isinstance(target, ast.Name):
        return found[1], None
    names = [name_of(t) for t in target.elts] if isinstance(target, ast.Tuple) else []
    plain = isinstance(value, ast.Name) and value.id in names and found[1] is found[0].value
    return (found[1], names.index(value.id)) if plain and isinstance(value, ast.Name) else (None, None)


def _hands_back(
    script: Script, function: Function, index: int | None, losses: set[tuple[Function | None, str]]
) -> bool:
    """Every return is a loss that was trained on in it, as it is, and nothing cut it in between."""
    words = {n.attr for n in ast.walk(function) if isinstance(n, ast.Attribute)}
    if not {"backward", "step"} <= words:
        return False
    returns = [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and script.scope_of(n) is function]
    if index is not None:
        tuples = [r for r in returns if isinstance(r, ast.Tuple) and index < len(r.elts)]
        if len(tuples) != len(returns):
            return False
        returns = [r.elts[index] for r in tuples]
    names = [name_of(r) for r in returns]
    trained = [c.lineno for c in script.calls.get("backward", ()) if script.scope_of(c) is function]
    late = [s for n in names for s, _ in script.assigned.get((function, n), ()) if s.lineno > max(trained, default=0)]
    return bool(names) and not late and all((function, name) in losses for name in names)


def _total_is_trained_on(script: Script, total: str) -> bool:
    return any(total in ast.unparse(call.func) for call in script.calls.get("backward", ()))


def check(context: Context) -> Iterator[Hit]:
    """For every loss with a name."""
    for event in context.events("backward"):
        loops = context.script.loops_of(event.node)
        if event.no_grad:
            continue
        names = loss_names(context.script, event)
        if not loops:
            yield from in_a_method(context, event, names)
            continue
        if names:
            yield from _summed(context, event, names, loops[0])
            yield from listed(context, event, names, loops[0])
            yield from in_a_meter(context, event, names, loops[0])
        given = outputs(context.script, event, loops[0])
        if given:
            yield from listed(context, event, given, loops[0])
    yield from handed_back(context)
    yield from in_training_step(context)


def _summed(context: Context, event: Event, names: list[str], loop: ast.AST) -> Iterator[Hit]:
    script, scope = context.script, context.script.scope_of(event.node)
    for node in ast.walk(loop):
        added = added_to(node)
        if added is None or script.scope_of(node) is not scope or not isinstance(node, ast.stmt):
            continue
        total, value = added
        found = bare(script, value, names)
        if found is None or total in names or goes_back(script, total, scope) or under_no_grad(script, node):
            continue
        name = path_of(found)
        if begun_in(script, loop, scope, total, node) or is_cut_before(script, event, name, node):
            continue
        if _is_for_one_update(context, loop, scope, total, node):
            continue
        diff = context.edit().replace(found, f"{ast.unparse(found)}.item()").diff()
        yield hit("SS302", node, f"{total} sums {name} with its graph", diff=diff, snippet=f"{name}.item()")


def _is_for_one_update(context: Context, loop: ast.AST, scope: ScriptScope, total: str, node: ast.stmt) -> bool:
    """Begun right before a loop over the parts of one update, whose step comes after it: few graphs, soon gone."""
    script = context.script
    counted = isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call) and name_of(loop.iter.func) == "range"
    if not counted or "." in total:
        return False
    block = script.parents.get(loop)
    steps = [e.node for e in context.events("step", "scaler-step") if script.scope_of(e.node) is scope]
    after = [s for s in steps if loop not in script.ancestors(s) and getattr(s, "lineno", 0) > node.lineno]
    beside = [s for s in after if block is scope or block in set(script.ancestors(s))]
    begun = [s for s, _ in script.assigned.get((scope, total), ()) if s is not node]
    inside = any(loop in script.ancestors(s) for s in steps)
    return bool(beside) and not inside and bool(begun) and all(script.parents.get(s) is block for s in begun)


def begun_in(script: Script, loop: ast.AST, scope: ScriptScope, total: str, but: ast.AST) -> bool:
    """Begun anew now and then: the graphs are few."""
    if any(s is not but and loop in script.ancestors(s) for s, _ in script.assigned.get((scope, total), ())):
        return True
    if not total.startswith("self."):
        return False
    anew = {script.scope_of(s) for s, _ in script.named.get(total, ()) if s is not but} - {scope, None}
    calls = [n for n in ast.walk(loop) if isinstance(n, ast.Call)]
    return any(target_of(c, script) in anew for c in calls)


def added_to(node: ast.AST) -> tuple[str, ast.expr] | None:
    """(total, what is added) of `total += x`, of `total = total + x`, and of the same after an `if total is None`."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        target = node.target.value if isinstance(node.target, ast.Subscript) else node.target
        return name_of(target), node.value
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return None
    target, value = node.targets[0], node.value
    total = path_of(target) or (name_of(target.value) if isinstance(target, ast.Subscript) else "")
    ways = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
    for way in ways:  # a running mean is a total too: 0.9 * total + 0.1 * loss
        if not isinstance(way, ast.BinOp) or not isinstance(way.op, ast.Add) or not total:
            continue
        for own, other in ((way.left, way.right), (way.right, way.left)):
            if ast.dump(target).replace("Store", "Load") in {ast.dump(n) for n in ast.walk(own)}:
                return total, other
    return None
