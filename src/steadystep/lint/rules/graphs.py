"""What a loss hangs on: the names that its graph goes through in one pass, and what was made in that pass."""

import ast
from collections.abc import Sequence
from dataclasses import replace

from steadystep.lint.events import Event
from steadystep.lint.names import calls_in, last, name_of, parameters, passed
from steadystep.lint.networks import is_model_call
from steadystep.lint.rules.loss import cut_at
from steadystep.lint.rules.origins import runs
from steadystep.lint.rules.passes import leads_to_one
from steadystep.lint.script import Function, Script

LoopStatement = ast.For | ast.AsyncFor | ast.While
_PUTS = ("append", "extend", "insert", "add", "update", "push", "appendleft", "put")
_NO_GRAPHS = ("torch", "numpy", "random", "math", "argparse", "time", "os", "itertools", "copy")
MOVES = ("to", "cuda", "cpu", "float", "long", "half", "view", "reshape", "flatten", "squeeze", "unsqueeze")
"""Methods that give the same data back."""
_DEEPEST = 3


def graph_of(script: Script, event: Event, loop: LoopStatement | None) -> set[str] | None:
    """The names that the loss comes from; None when some of it comes from outside or from an earlier pass.

    Without a loop in the function, one call of it is a pass.
    """
    scope = script.scope_of(event.node)
    body: ast.AST = loop or scope or script.tree
    inside = {id(n) for n in ast.walk(body)}
    inner = [n for n in ast.walk(body) if isinstance(n, ast.For | ast.AsyncFor) and n is not loop]
    added = [n for n in ast.walk(body) if isinstance(n, ast.AugAssign)]
    waiting, seen = [event.loss], set[str]()
    while waiting:
        expr = waiting.pop()
        for name in _read(expr) - seen if expr is not None else ():
            seen.add(name)
            assigned = script.assigned.get((scope, name), ())
            anew = any(id(stmt) in inside for stmt, _ in assigned)
            if not anew and loop is not None and any(name_of(n.target) == name for n in added):
                return None  # a sum that goes on from pass to pass
            if _carried(script, [a for a in assigned if id(a[0]) in inside], name, event, loop):
                return None
            sure = loop is not None and _is_made_anew(script, assigned, name, event, loop)
            for stmt, value in assigned:
                if sure and id(stmt) not in inside:
                    continue
                if id(stmt) in inside:
                    waiting.append(value)
                    if _is_taken_apart(stmt, value) and may_hold_a_graph(script, value):
                        seen.add(f"@{stmt.lineno}")  # what comes out of one call may share its graph
                elif may_hold_a_graph(script, value) or _may_grow(body, name) or _was_filled(script, stmt, name):
                    return None
            waiting += [n.value for n in added if name_of(n.target) == name]
            waiting += [n.iter for n in inner if name in {name_of(t) for t in ast.walk(n.target)}]
    return seen


def _is_made_anew(
    script: Script, assigned: Sequence[tuple[ast.stmt, ast.expr]], name: str, event: Event, loop: LoopStatement
) -> bool:
    """Every pass gives the name another value before backward: what it was outside of the loop does not matter."""
    for stmt, value in assigned:
        place = script.parents.get(stmt)
        while isinstance(place, ast.With | ast.AsyncWith):
            place = script.parents.get(place)
        if place is loop and stmt.lineno <= event.line and name not in _read(value):
            return True
    return False


def _is_taken_apart(stmt: ast.stmt, value: ast.expr) -> bool:
    """`a, b = f(x)`."""
    targets = stmt.targets if isinstance(stmt, ast.Assign) else []
    return isinstance(value, ast.Call) and any(isinstance(t, ast.Tuple | ast.List) for t in targets)


def _may_grow(body: ast.AST, name: str) -> bool:
    """A list or a table from outside that something is put into here, perhaps with its graph."""
    for node in ast.walk(body):
        if isinstance(node, ast.Attribute) and node.attr in _PUTS and name_of(node.value) == name:
            return True
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and name_of(node.value) == name:
            return True
    return False


def _was_filled(script: Script, made: ast.stmt, name: str) -> bool:
    """A list from outside in which more than data was put there: earlier networks, their outputs."""
    scope = script.scope_of(made)
    calls = [c for word in _PUTS for c in script.calls.get(word, ()) if script.scope_of(c) is scope]
    puts = [c for c in calls if isinstance(c.func, ast.Attribute) and name_of(c.func.value) == name]
    return any(not _is_data(script, value) for c in puts for value in c.args)


def _is_data(script: Script, value: ast.expr) -> bool:
    if isinstance(value, ast.Tuple | ast.List):
        return all(_is_data(script, part) for part in value.elts)
    if isinstance(value, ast.Call):
        return script.full(value.func).startswith(("torch.", "numpy.")) or cut_at(value) is not None
    if isinstance(value, ast.Name):
        return (script.scope_of(value), value.id) not in script.assigned  # the variable of a loop over data
    return isinstance(value, ast.Constant)


def _read(expr: ast.expr) -> set[str]:
    """Names whose values go in with their graphs; what is only called is a function, not a value."""
    cuts = [n for n in ast.walk(expr) if isinstance(n, ast.expr) and cut_at(n) is not None]
    gone = {id(n) for cut in cuts for n in ast.walk(cut)}
    gone |= {id(n.func) for n in ast.walk(expr) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    return {n.id for n in ast.walk(expr) if isinstance(n, ast.Name) and id(n) not in gone}


def _carried(
    script: Script, assigned: list[tuple[ast.stmt, ast.expr]], name: str, event: Event, loop: LoopStatement | None
) -> bool:
    """Whether a name takes something of itself from pass to pass: `h = f(h)`, if nothing in the pass made it anew."""
    early = sorted((a for a in assigned if a[0].lineno <= event.line), key=lambda a: a[0].lineno)
    own = [(s, v) for s, v in early if name in {n.id for n in ast.walk(v) if isinstance(n, ast.Name)}]
    if not own or loop is None:
        return False
    around = [a for a in script.loops_of(own[0][0]) if a is loop or loop in script.ancestors(a)]
    if any(not isinstance(a, ast.While) and name in {name_of(t) for t in ast.walk(a.target)} for a in around):
        return False  # the loop gives a new one each time
    first = early[0][0]
    return early[0] in own or not isinstance(first, ast.Assign) or script.parents.get(first) is not loop


def may_hold_a_graph(script: Script, value: ast.expr) -> bool:
    """A network has run for it, or a function that this file does not show."""
    for call in calls_in(value):
        if is_model_call(call, script) or leads_to_one(call, script):
            return True
        name = name_of(call.func)
        imported = script.imports.get(name, "")
        if imported and not imported.startswith(_NO_GRAPHS) and last(imported)[:1].islower():
            return True
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("forward", "encode", "embed", "features"):
            return True
    return False


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
