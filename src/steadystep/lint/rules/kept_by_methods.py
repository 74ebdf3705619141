"""SS302 in the method that trains: `self.history.append(loss)` next to the backward, or in a framework's step."""

import ast
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.events import Event
from steadystep.lint.hit import Hit
from steadystep.lint.names import name_of
from steadystep.lint.rules.keeping import FORGETS, empties, keeps, kept_in
from steadystep.lint.rules.lists import grows
from steadystep.lint.script import Script


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
            if not kept or given is None or not late or _is_cut(script, event, name, node) or empties(function, kept):
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


def _is_cut(script: Script, event: Event, name: str, node: ast.AST) -> bool:
    found = script.reaching(name, node)
    return found is not None and found[0].lineno > event.line
