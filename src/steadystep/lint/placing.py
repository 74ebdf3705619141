"""What is met at a place: the passes of a loop, and calls as events."""

import ast
from dataclasses import replace

from steadystep.lint.control import HARMLESS, is_main_guard, is_no_grad, switches_off
from steadystep.lint.events import Comprehension, EnteredLoop, Event, EventKind, LoopNode, Seen
from steadystep.lint.flow import UNKNOWN, answer, goes_over, is_about_networks, written_out
from steadystep.lint.names import last, name_of, owner_of, parameters
from steadystep.lint.place import Place
from steadystep.lint.roles import Roles, is_managed
from steadystep.lint.script import Script

_AROUND = ("enumerate", "tqdm", "trange", "iter", "list", "islice", "track")


def passes_of(
    node: LoopNode, target: ast.expr, over: ast.expr, body: list[ast.AST], place: Place, script: Script, number: int
) -> list[Place]:
    """A place for each pass that is written out; else one inside of a loop. A negative number asks for the latter."""
    about = is_about_networks(body)
    bindings = written_out(target, over, script) if number > 0 else None
    if bindings is not None and (about or all(isinstance(v, tuple) for b in bindings for v in b.values())):
        return [place.with_bound(binding) for binding in bindings]
    each = goes_over(target, over, body) if about else None
    if each is not None and not any(isinstance(n, ast.For | ast.While) for part in body for n in ast.walk(part)):
        return [place.with_bound(each)]
    changed = {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
    return [repeated(node, over, place, abs(number), script).forgetting(changed)]


def repeated(node: LoopNode, over: ast.expr | None, place: Place, number: int, script: Script) -> Place:
    """Inside of a loop."""
    while isinstance(over, ast.Call) and over.args and last(name_of(over.func)) in _AROUND:
        over = over.args[0]
    loop = EnteredLoop(
        node=node,
        number=number,
        over=place.words(over) if over is not None else frozenset(),
        path="" if _is_local(over, place, script) else place.outer(owner_of(over)),
        phases=frozenset(value for value in place.known.values() if isinstance(value, str)),
        sites=place.sites,
    )
    return place.within(loop)


def _is_local(over: ast.expr | None, place: Place, script: Script) -> bool:
    """A variable of a function that was called, or a parameter that was given no name: it may hold anything."""
    if not isinstance(over, ast.Name) or len(place.sites) == 0 or over.id in place.names:
        return False
    function = place.stack[-1]
    return (function, over.id) in script.assigned or over.id in parameters(function)


def parts_of(node: Comprehension) -> list[ast.AST]:
    """What a comprehension works out in each pass."""
    values: list[ast.AST] = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
    return [*node.generators[0].ifs, *(p for g in node.generators[1:] for p in (g.iter, *g.ifs)), *values]


def sure_arm(stmt: ast.If, place: Place, script: Script) -> list[ast.stmt] | None:
    """The arm of an `if` that is taken for sure; None when both may be."""
    if is_main_guard(stmt):
        return stmt.body
    sure = answer(stmt.test, place.known, script) if place.known else UNKNOWN
    return None if sure is UNKNOWN else stmt.body if sure else stmt.orelse


def event_of(seen: Seen, call: ast.Call, stmt: ast.stmt, place: Place, script: Script) -> Event:
    """A call that matters, by the names of the outermost caller."""
    return Event(
        kind=_mode(call, place, script) if seen.kind == "train" else seen.kind,
        node=call,
        stmt=stmt,
        owner=place.outer(seen.owner),
        local=seen.owner,
        scaled=seen.scaled,
        managed=seen.managed,
        loss=seen.loss,
        subject=place.outer(seen.subject),
    )


def _mode(call: ast.Call, place: Place, script: Script) -> EventKind:
    """Of `model.train(flag)`."""
    given = [*call.args, *(k.value for k in call.keywords)]
    flag = answer(given[0], place.known, script) if given else True
    return "mode" if flag is UNKNOWN else "train" if flag else "eval"


def _turned_off(call: ast.expr, place: Place, script: Script) -> bool:
    """`set_grad_enabled(training)` where the flag is sure."""
    if not isinstance(call, ast.Call) or not is_no_grad(call) or not name_of(call.func).endswith("set_grad_enabled"):
        return False
    given = [*call.args, *(k.value for k in call.keywords)]
    return bool(given) and answer(given[0], place.known, script) is False


def inside_of(manager: ast.expr, place: Place, script: Script) -> Place:
    """Where a `with` has begun, with gradients off if it switches them off."""
    off = switches_off(manager, script) or _turned_off(manager, place, script)
    return replace(place, no_grad=place.no_grad or off)


def opaque(call: ast.Call, stmt: ast.stmt, place: Place, script: Script, roles: Roles) -> Event | None:
    """A call out of the file that takes an optimizer with it may do anything to it; so may an engine's step."""
    if roles.made_by(call) == "scheduler":
        return None
    name = name_of(call.func)
    given = [*call.args, *(k.value for k in call.keywords)]
    takes = [name_of(a) for a in given if roles.of(name_of(a), call) == "optimizer"]
    if (
        last(name) in HARMLESS
        or roles.of(name.rpartition(".")[0], call) == "scaler"
        or not (takes or is_managed(name.rpartition(".")[0]))
    ):
        return None
    owner = place.outer(takes[0]) if takes else ""
    return Event(kind="opaque", node=call, stmt=stmt, owner=owner, local=owner)


def cleared_by_hand(stmt: ast.stmt, script: Script) -> list[Event]:
    """`p.grad = None`, but not `if "head" in name: p.grad = None`, which leaves the others."""
    if not isinstance(stmt, ast.Assign) or not isinstance(stmt.value, ast.Constant) or stmt.value.value is not None:
        return []
    grads = [t for t in stmt.targets if isinstance(t, ast.Attribute) and t.attr == "grad"]
    if grads and _is_picked(stmt, script):
        return []
    return [Event(kind="zero", node=stmt, stmt=stmt, owner="", local="") for _ in grads]


def _is_picked(stmt: ast.stmt, script: Script) -> bool:
    """In a loop over named parameters, and only for those whose name has something in it."""
    asked = [a.test for a in script.ancestors(stmt) if isinstance(a, ast.If)]
    loops = [a for a in script.loops_of(stmt) if isinstance(a, ast.For) and isinstance(a.target, ast.Tuple)]
    names = {n.id for loop in loops[:1] for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
    return any(
        isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.In) and name_of(test.comparators[0]) in names
        for test in asked
    )


def placed(event: Event, place: Place, top: ast.AST | None) -> Event:
    """An event with where it was met."""
    return replace(
        event,
        branch=place.branch,
        loops=place.loops,
        no_grad=place.no_grad,
        last_round=place.last_round,
        depth=len(place.stack),
        top=top,
    )
