"""SS110: a graph that is kept for nothing."""

import ast
import re
from collections.abc import Iterator

from steadystep.lint.context import Context, hit, only_goes_back
from steadystep.lint.events import Event
from steadystep.lint.names import last, looks_like_loss, name_of, parameters
from steadystep.lint.networks import makes_module
from steadystep.lint.report import Hit
from steadystep.lint.rules.graphs import MOVES, graph_of, is_data, is_fresh, is_state
from steadystep.lint.rules.loss import cut_at
from steadystep.lint.script import Function, Script

_NEW_TENSORS = ("ones", "zeros", "full", "rand", "randn", "randint", "empty", "tensor", "arange", "eye", "ones_like")
_STATE = re.compile(r"hidden(?!_?(size|dim|unit|layer|channel))|memor|(^|_)states?$|^(h|c|hx|cx|hc)\d?$", re.I)
_RECURRENT = frozenset({"LSTM", "GRU", "RNN", "LSTMCell", "GRUCell"})


def check(context: Context) -> Iterator[Hit]:
    """For every backward that keeps its graph."""
    for event in context.events("backward"):
        yield from _retained(context, event)


def _retained(context: Context, event: Event) -> Iterator[Hit]:
    call, script = event.node, context.script
    if not isinstance(call, ast.Call) or (event.managed and not only_goes_back(context, event)):
        return
    asked = next((k for k in call.keywords if k.arg == "retain_graph"), None)
    if asked is None or not (isinstance(asked.value, ast.Constant) and asked.value.value is True):
        return
    root = next(r for r in context.roots if event in r)
    others = [e for e in root if e.kind in ("backward", "grad-call", "opaque") and event.inner in e.loops]
    again = sum(e.node is call for e in others) != 1
    if event.inner is None or again or any(e.kind != "backward" for e in others):
        return
    if any(k.arg == "create_graph" for k in call.keywords) or not any(e.kind in ("step", "scaler-step") for e in root):
        return
    loops, function = script.loops_of(call), script.scope_of(call)
    if not loops and function is None:
        return
    graph = graph_of(script, event, loops[0] if loops else None)
    fresh = len(others) == 1 and graph is not None and is_fresh(script, event, graph)
    if graph is None or (not loops and not _starts_and_ends_here(script, function, graph, fresh=fresh)):
        return
    if len(others) > 1 and not looks_like_loss(name_of(event.loss)):
        return
    later = [e for e in others if root.index(e) > root.index(event)]
    if any(_goes_through(context, event, graph, other) for other in later):
        return
    around = loops[0] if loops else function
    if (around is not None and _has_state(around) and script.calls.keys() & _RECURRENT) or _remembers(script):
        return
    diff = context.edit().replace(call, _without(call, "retain_graph")).diff()
    message = "retain_graph=True, but nothing runs backward through this graph again"
    yield hit("SS110", call, message, diff=diff)


def _goes_through(context: Context, event: Event, graph: set[str], other: Event) -> bool:
    """Whether a later backward of the same pass may meet something of this graph."""
    script, loops = context.script, context.script.loops_of(event.node)
    if script.scope_of(other.node) is not script.scope_of(event.node):
        return bool(loops)  # without a loop nothing leaves the function that this one is in
    if loops and loops[0] not in script.loops_of(other.node):
        return True
    theirs = graph_of(script, other, loops[0] if loops else None)
    return theirs is None or any(not _is_graph_free(script, name, event.node) for name in graph & theirs)


def _is_graph_free(script: Script, name: str, at: ast.AST) -> bool:
    """Data of the loop, a network, a tensor that torch has just made: shared, but no part of a graph."""
    if name.startswith("@"):
        return False
    scope = script.scope_of(at)
    values = [value for _, value in script.assigned.get((scope, name), ())]
    if values or scope is None:
        return all(_makes_no_graph(script, value) for value in values)
    if name == "self":
        stored = (n for n in ast.walk(scope) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
        return scope.name != "__init__" and not any(name_of(n).startswith("self.") for n in stored)
    return name not in parameters(scope) or is_data(script, scope, name)


def _makes_no_graph(script: Script, value: ast.expr) -> bool:
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in MOVES:
        value = value.func.value
    if isinstance(value, ast.Call):
        made = last(script.full(value.func)) in _NEW_TENSORS and script.full(value.func).startswith("torch.")
        return made or makes_module(value, script) or cut_at(value) is not None
    return isinstance(value, ast.Constant | ast.Name)


def _has_state(node: ast.AST) -> bool:
    """A hidden state goes around in it; a size of one is a number."""
    names = (n.id if isinstance(n, ast.Name) else getattr(n, "attr", "") for n in ast.walk(node))
    return any(_STATE.search(name) for name in names)


def _remembers(script: Script) -> bool:
    """A network of this file that keeps something of one pass for the next."""
    stores = (n for f in script.functions.get("forward", ()) for n in ast.walk(f))
    return any(isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) for n in stores)


def _without(call: ast.Call, keyword: str) -> str:
    kept = ast.Call(func=call.func, args=call.args, keywords=[k for k in call.keywords if k.arg != keyword])
    return ast.unparse(ast.copy_location(kept, call))


def _starts_and_ends_here(script: Script, function: Function | None, graph: set[str], *, fresh: bool) -> bool:
    """A function with one pass in it: only data, or what was just made, comes in, and only numbers go out."""
    if function is None or function.name == "closure":
        return False
    given = [n for n in parameters(function) if n in graph and n != "self"]
    if not fresh and not all(is_data(script, function, name) for name in given):
        return False
    made = graph - {"self"} if fresh else graph - set(given) - {"self"}
    for node in ast.walk(function):
        if isinstance(node, ast.Return | ast.Yield) and node.value is not None and _leaks(node.value, made):
            return False
        if isinstance(node, ast.Assign) and _is_elsewhere(node) and _leaks(node.value, made):
            return False
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and is_state(script, node):
            return False
    return True


def _is_elsewhere(stmt: ast.Assign) -> bool:
    """Assigns to an attribute or an entry, which outlives the call."""
    return any(isinstance(n, ast.Attribute | ast.Subscript) for t in stmt.targets for n in ast.walk(t))


def _leaks(value: ast.expr, made: set[str]) -> bool:
    """Whether a value that is kept or handed back still hangs on the graph."""
    if cut_at(value) is not None:
        return False
    if isinstance(value, ast.Name):
        return value.id in made
    return any(_leaks(child, made) for child in ast.iter_child_nodes(value) if isinstance(child, ast.expr))
