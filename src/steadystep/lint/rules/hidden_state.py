"""SS306: a loss that hangs, through a hidden state, on the graphs of all earlier batches."""

import ast
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.events import Event
from steadystep.lint.names import last, looks_like_loss, looks_like_model, name_of, path_of
from steadystep.lint.networks import is_model_call
from steadystep.lint.report import Hit
from steadystep.lint.rules.kept_states import STATE_NAMES as _STATE
from steadystep.lint.rules.kept_states import half_cut, kept_on_self
from steadystep.lint.rules.loss import CUTS
from steadystep.lint.script import Function, Script
from steadystep.lint.targets import target_of

_PAIR = {"c", "cx", "cell"}  # the other half of an LSTM's state


def check(context: Context) -> Iterator[Hit]:
    """For every backward in a loop, and for what a network or a learner keeps of one batch for the next."""
    for event in context.events("backward"):
        if not event.no_grad and not event.managed:
            yield from _carried(context, event)
    yield from kept_on_self(context)
    yield from half_cut(context)


def _carried(context: Context, event: Event) -> Iterator[Hit]:
    """`out, h = model(x, h)` in the loop that also calls backward, with `h` never cut."""
    script = context.script
    loops = script.loops_of(event.node)
    if not loops:
        yield from _through_a_function(context, event)
        return
    for node in ast.walk(loops[0]):
        if not isinstance(node, ast.Assign) or script.loops_of(node)[:1] != loops[:1]:
            continue
        call = node.value
        if not isinstance(call, ast.Call) or not _runs_a_network(script, call):
            continue
        given = {n for a in (*call.args, *(k.value for k in call.keywords)) for n in _plain_names(a)}
        kept = {n for target in node.targets for n in _plain_names(target)} & given
        states = sorted(n for n in kept if _STATE.search(_leaf(n)) or (_PAIR & {_leaf(n)} and len(kept) > 1))
        if node.lineno < event.line and states and not any(_renewed(script, loops[0], node, n) for n in states):
            diff = context.edit().put_before(node, *(_detached(script, name) for name in states)).diff()
            verb = "carries" if len(states) == 1 else "carry"
            message = f"{' and '.join(states)} {verb} the graph of every earlier batch into this one"
            yield hit("SS306", node, message, diff=diff)


def _through_a_function(context: Context, event: Event) -> Iterator[Hit]:
    """`loss, state = train_step(x, y, state)`, of a function that trains and gives the state back as it is."""
    script = context.script
    function = script.scope_of(event.node)
    words = {n.attr for n in ast.walk(function) if isinstance(n, ast.Attribute)} if function is not None else set()
    if function is None or words & {"detach", "detach_", "data", "clone"} or event.no_grad:
        return
    for call in script.calls.get(function.name, ()):
        stmt, loops = script.parents.get(call), script.loops_of(call)
        if not loops or not isinstance(stmt, ast.Assign) or target_of(call, script) is not function:
            continue
        given = {n for a in (*call.args, *(k.value for k in call.keywords)) for n in _plain_names(a)}
        kept = {n for target in stmt.targets for n in _plain_names(target)} & given
        states = sorted(n for n in kept if _STATE.search(_leaf(n)))
        if states and _keeps_state(script, function) and not any(_renewed(script, loops[0], stmt, n) for n in states):
            diff = context.edit().put_before(stmt, *(_detached(script, name) for name in states)).diff()
            message = f"{' and '.join(states)} carries the graph of every earlier batch into this one"
            yield hit("SS306", stmt, message, diff=diff)


def _keeps_state(script: Script, function: Function) -> bool:
    """`out, state = rnn(x, state)` in it, and the state goes back to the caller by that name."""
    trained = {
        last(name_of(c.func.value)) for c in script.calls.get("parameters", ()) if isinstance(c.func, ast.Attribute)
    }
    returned = {n for r in ast.walk(function) if isinstance(r, ast.Return) and r.value for n in _plain_names(r.value)}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _runs_a_network(script, node.value):
            given = {n for a in node.value.args for n in _plain_names(a)}
            kept = {n for target in node.targets for n in _plain_names(target)} & given & returned
            if last(name_of(node.value.func)) in trained and any(_STATE.search(_leaf(n)) for n in kept):
                return True
    return False


def _plain_names(node: ast.AST) -> Iterator[str]:
    """`h` and `c` of `(h, c)`; a name inside a call is not given as it is."""
    if isinstance(node, ast.Tuple | ast.List):
        for part in node.elts:
            yield from _plain_names(part)
    elif path_of(node):
        yield path_of(node)


def _leaf(name: str) -> str:
    """`h` of `self.h` and of `state['h']`."""
    return name[:-1].rpartition("[")[2].strip("'") if name.endswith("]") else last(name)


def _runs_a_network(script: Script, call: ast.Call) -> bool:
    """Itself, or as a function of this file that does not cut anything."""
    if is_model_call(call, script) or looks_like_model(name_of(call.func)):
        return True
    function = target_of(call, script)
    if function is None or any(isinstance(n, ast.Attribute) and n.attr in CUTS for n in ast.walk(function)):
        return False
    return any(isinstance(n, ast.Call) and is_model_call(n, script) for n in ast.walk(function))


def _detached(script: Script, name: str) -> str:
    if "LSTM" in script.calls and not _PAIR & {last(name)} and last(name) not in ("h", "hx"):
        return f"{name} = None if {name} is None else tuple(part.detach() for part in {name})"
    return f"{name} = None if {name} is None else {name}.detach()"


def _renewed(script: Script, loop: ast.AST, carrying: ast.stmt, name: str) -> bool:
    for node in ast.walk(loop):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("detach_", "detach")
            and not looks_like_loss(name_of(node.func.value))
        ):
            return True
        if isinstance(node, ast.stmt) and node is not carrying:
            targets = node.targets if isinstance(node, ast.Assign) else []
            if any(path_of(t) == name for target in targets for t in ast.walk(target)):
                return True
    # why: a network that detaches its own state inside needs nothing from the loop
    return any(
        isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "detach"
        for f in script.functions.get("forward", ())
        for n in ast.walk(f)
    )
