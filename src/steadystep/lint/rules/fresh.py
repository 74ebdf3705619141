"""Whether what a function is given was made in the same pass: data of a loop, or a loss that was just computed."""

import ast
from dataclasses import replace

from steadystep.lint.bindings import parameters, passed
from steadystep.lint.events import Event
from steadystep.lint.modules import is_model_call
from steadystep.lint.names import name_of
from steadystep.lint.rules.graphs import graph_of, may_hold_a_graph
from steadystep.lint.rules.origins import runs
from steadystep.lint.script import Function, Script

MOVES = ("to", "cuda", "cpu", "float", "long", "half", "view", "reshape", "flatten", "squeeze", "unsqueeze")
"""Methods that give the same data back."""

_DEEPEST = 3


def is_fresh(script: Script, event: Event, graph: set[str], depth: int = 0) -> bool:
    """Every parameter in the graph of a loss is given, at the one place of the call, what that pass has made."""
    function = script.scope_of(event.node)
    if function is None or function.name == "closure" or depth > _DEEPEST:
        return False
    if any(
        isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load) and is_state(script, n) for n in ast.walk(function)
    ):
        return False
    sites = script.calls.get(function.name, ())
    names = parameters(function)
    given = [n for n in names if n in graph and n not in ("self", "cls")]
    if len(sites) != 1 or not given:
        return False
    site, offset = sites[0], 1 if names[:1] in (["self"], ["cls"]) else 0
    loops = script.loops_of(site)
    for name in given:
        value = passed(site, names.index(name) - offset, name)
        there = replace(event, node=site, stmt=script.stmt_of(site), loss=value)
        known = value is not None and all(_is_known(script, c) for c in ast.walk(value) if isinstance(c, ast.Call))
        outside = graph_of(script, there, loops[0] if loops else None) if known else None
        if outside is None or (not loops and not is_fresh(script, there, outside, depth + 1)):
            return False
    return True


def _is_known(script: Script, call: ast.Call) -> bool:
    """A function of the file, a network, or a method of what is there."""
    return isinstance(call.func, ast.Attribute) or runs(call, script) is not None or is_model_call(call, script)


def is_state(script: Script, node: ast.Attribute) -> bool:
    """An attribute that is set outside of `__init__` may carry a graph from call to call."""
    name, owner = name_of(node), script.class_of(node)
    if not name.startswith("self."):
        return False
    setters = [script.scope_of(s) for s, _ in script.named.get(name, ()) if script.class_of(s) is owner]
    return any(f is None or f.name != "__init__" for f in setters)


def is_data(script: Script, function: Function, name: str) -> bool:
    """Every caller in the file gives what its own loop has just taken from the data."""
    names = parameters(function)
    position = names.index(name) - (1 if names[:1] == ["self"] else 0)
    sites = script.calls.get(function.name, ())
    return bool(sites) and all(_from_a_loop(script, passed(c, position, name), c) for c in sites)


def _from_a_loop(script: Script, value: ast.expr | None, at: ast.AST) -> bool:
    while isinstance(value, ast.Call | ast.Attribute | ast.Subscript):
        if isinstance(value, ast.Call):
            if name_of(value.func) == "next":
                return True
            if not isinstance(value.func, ast.Attribute) or value.func.attr not in MOVES:
                return False
            value = value.func.value
        else:
            value = value.value
    if not isinstance(value, ast.Name):
        return False
    targets = [a.target for a in script.ancestors(at) if isinstance(a, ast.For | ast.AsyncFor)]
    for around in script.ancestors(at):
        if isinstance(around, ast.ListComp | ast.GeneratorExp | ast.SetComp):
            targets += [g.target for g in around.generators]
    if not any(value.id == name_of(n) for t in targets for n in ast.walk(t)):
        return False
    changed = script.assigned.get((script.scope_of(at), value.id), ())
    return all(not may_hold_a_graph(script, v) for _, v in changed)
