"""SS302 through a helper: a loss that is given, with its graph, to an object that adds up or collects what it gets."""

import ast
from collections.abc import Iterator

from steadystep.lint.bindings import Function, parameters
from steadystep.lint.context import Context, hit
from steadystep.lint.events import Event
from steadystep.lint.hit import Hit
from steadystep.lint.names import last, name_of, path_of
from steadystep.lint.rules.keeping import empties, keeps
from steadystep.lint.rules.kept_losses import is_loss
from steadystep.lint.rules.loss import under_no_grad
from steadystep.lint.rules.trained import goes_back
from steadystep.lint.script import Script
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
