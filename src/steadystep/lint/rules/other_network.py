"""SS604: the optimizer has the parameters of another network than the one the loss is computed with."""

import ast
from collections.abc import Iterator, Mapping

from steadystep.lint.context import Context, Cycle, hit
from steadystep.lint.control import bind
from steadystep.lint.events import Event
from steadystep.lint.names import looks_like_model, name_of, path_of
from steadystep.lint.networks import Network, is_model_call, network_identity, related
from steadystep.lint.report import Hit
from steadystep.lint.rules.evaluation_mode import no_grad_around
from steadystep.lint.script import Script
from steadystep.lint.targets import target_of

SETS_UP = (
    *("eval", "train", "to", "cuda", "cpu", "half", "float", "parameters", "named_parameters", "requires_grad_"),
    *("zero_grad", "state_dict", "load_state_dict", "buffers", "named_buffers", "modules", "named_modules", "children"),
)  # fmt: skip
"""Methods of a network that do not run it."""


def unrelated(context: Context, cycle: Cycle) -> Iterator[Hit]:
    """Every network that runs in the loop is another than those the optimizer holds, and nobody else has these."""
    script, step = context.script, cycle.step
    if any(e.kind in ("opaque", "guard", "grad-call") for e in cycle.events) or cycle.loop is None:
        return
    if len({e.owner if e.kind == "step" else e.subject for e in cycle.of("step", "scaler-step")}) != 1:
        return
    held = context.stepped(step)
    run = [e for e in cycle.events if e.kind == "forward" and not e.no_grad]
    if not held or not run:
        return
    used = [Network(e.local, e.node) for e in run]
    if any(related(script, a, b) is not False for a in held for b in used):
        return
    if any(_is_used_otherwise(script, network) for network in held) or _writes_gradients(script):
        return
    if _hands_weights(script, {n.path for n in held}, {n.path for n in used}):
        return
    made = context.roles.optimizer_call(step.local if step.kind == "step" else step.subject, step.node)
    place: ast.AST = made if made is not None else step.node
    names, other = ", ".join(n.path for n in held), _name(run[0])
    message = f"the optimizer updates {names}, the loss is computed with {other}"
    yield hit("SS604", place, message, snippet=f"torch.optim.AdamW({other}.parameters(), lr=1e-3)")


def _hands_weights(script: Script, held: set[str], used: set[str]) -> bool:
    """What the optimizer has changed is copied into the network that runs."""
    for call in script.calls.get("load_state_dict", ()):
        owner = path_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        words = {path_of(n) for a in call.args for n in ast.walk(a)}
        if owner in used and words & held:
            return True
    for loop in (n for n in script.nodes if isinstance(n, ast.For) and isinstance(n.iter, ast.Call)):
        names = [_first_path(a) for a in loop.iter.args] if isinstance(loop.iter, ast.Call) else []
        parts = loop.target.elts if isinstance(loop.target, ast.Tuple) else []
        if len(names) != len(parts) or not set(names) & held:
            continue
        into = {path_of(p) for p, n in zip(parts, names, strict=True) if n in used}
        changed = {_first_path(n.func) for s in loop.body for n in ast.walk(s) if isinstance(n, ast.Call)}
        if any(c == i or c.startswith(f"{i}.") for c in changed for i in into if i):
            return True
    return False


def _first_path(node: ast.AST) -> str:
    """`teacher` of `teacher.parameters()` and of `teacher.data.mul_(0.9).add_(x)`."""
    while isinstance(node, ast.Call | ast.Attribute):
        node = node.func if isinstance(node, ast.Call) else node.value
    return path_of(node)


def _name(event: Event) -> str:
    return event.local


def _writes_gradients(script: Script) -> bool:
    return any(isinstance(n, ast.Attribute) and n.attr == "grad" and isinstance(n.ctx, ast.Store) for n in script.nodes)


def _is_used_otherwise(script: Script, network: Network) -> bool:
    """Given to somebody out of the file, or asked for something that may run it."""
    mine = network_identity(script, network)
    for node in script.nodes:  # a method that may run it, or a part of it such as `table.weight`
        other = path_of(node.value) if isinstance(node, ast.Attribute) and node.attr not in SETS_UP else ""
        if other and mine & network_identity(script, Network(other, node)):
            return True
    for calls in list(script.calls.values()):
        for call in calls:
            for given in (*call.args, *(k.value for k in call.keywords)):
                taken = path_of(given) and mine & network_identity(script, Network(path_of(given), call))
                if taken and target_of(call, script) is None and not _is_harmless(script, call):
                    return True
    return False


def _is_harmless(script: Script, call: ast.Call) -> bool:
    leaf = call.func.attr if isinstance(call.func, ast.Attribute) else path_of(call.func)
    return leaf in ("deepcopy", "print", "len", "id", "zip", "save", "isinstance", "type", "append")


def check(context: Context) -> Iterator[Hit]:
    """For every step in every loop."""
    for cycle in context.cycles:
        told = list(_judge(context, cycle))
        yield from told or unrelated(context, cycle)


def _judge(context: Context, cycle: Cycle) -> Iterator[Hit]:
    """The loss comes from one network by name, the optimizer has another, and nothing ties the two together."""
    script, step = context.script, cycle.step
    if any(e.kind in ("opaque", "guard", "grad-call") for e in cycle.events):
        return
    made = context.roles.optimizer_call(step.local if step.kind == "step" else step.subject, step.node)
    held = context.roles.model_of(made) if made is not None else ""
    if made is None or not held or len(_steps(cycle)) != 1:
        return
    if any(isinstance(around, ast.ListComp | ast.DictComp | ast.GeneratorExp) for around in script.ancestors(made)):
        return  # one optimizer for each network of a list
    place = _place(script, cycle, made, held)
    if place is None:
        return
    region, names, through = place
    used = {names.get(n, n) for n in _networks_in(script, region)}
    if (
        held in used
        or not used
        or _is_run(script, held, region, names)
        or _passed_on(script, held, made, region, names, through)
    ):
        return
    if any(_tied(script, held, other, through) for other in used):
        return
    other = sorted(used)[0]
    params = made.args[0] if made.args else None
    diff = context.edit().replace(params, f"{other}.parameters()").diff() if params is not None else ""
    yield hit("SS604", made, f"the optimizer updates {held}, the loss is computed with {other}", diff=diff)


def _is_run(script: Script, held: str, region: ast.AST, names: Mapping[str, str]) -> bool:
    """Called in the region with gradients, whatever its name looks like."""
    calls = [n for n in ast.walk(region) if isinstance(n, ast.Call)]
    mine = [c for c in calls if names.get(name_of(c.func), name_of(c.func)) == held]
    return any(not no_grad_around(script, c) for c in mine)


def _place(
    script: Script, cycle: Cycle, made: ast.Call, held: str
) -> tuple[ast.AST, Mapping[str, str], ast.Call | None] | None:
    """Where the networks run, what they are called where the optimizer is made, and the call that leads there."""
    scope = script.scope_of(cycle.step.node)
    if held.startswith("self."):
        owner = script.class_of(made)
        return (
            (owner, {}, None)
            if owner is not None and held.count(".") == 1 and owner is script.class_of(cycle.step.node)
            else None
        )
    if "." in held:
        return None
    if script.scope_of(made) is scope:
        return cycle.loop.node if cycle.loop is not None else (scope or script.tree), {}, None
    sites = script.calls.get(scope.name, ()) if scope is not None else ()
    if scope is None or len(sites) != 1 or script.scope_of(sites[0]) is not script.scope_of(made):
        return None
    return scope, bind(scope, sites[0], {}), sites[0]


def _steps(cycle: Cycle) -> set[str]:
    return {e.owner for e in cycle.root if e.kind in ("step", "scaler-step")}


def _networks_in(script: Script, region: ast.AST) -> set[str]:
    """Networks that are called by name outside of no_grad."""
    found = set()
    for node in ast.walk(region):
        if isinstance(node, ast.Call) and is_model_call(node, script) and not no_grad_around(script, node):
            name = name_of(node.func)
            if looks_like_model(name) and (isinstance(node.func, ast.Name) or name.count(".") == 1):
                found.add(name)
    return found


def _passed_on(
    script: Script, model: str, optimizer: ast.Call, region: ast.AST, names: Mapping[str, str], through: ast.Call | None
) -> bool:
    """Given to somebody who may use or wrap it, or used through an attribute or a method."""
    inside = {id(n) for n in ast.walk(region)} if through is not None or isinstance(region, ast.ClassDef) else set()
    scope = script.scope_of(optimizer)
    local = {model, *(mine for mine, theirs in names.items() if theirs == model)}
    for node in script.nodes:
        if isinstance(node, ast.Attribute) and name_of(node.value) in local and node.attr not in SETS_UP:
            return True  # `table.weight` is used without a call
        if not isinstance(node, ast.Call) or node is optimizer or node is through:
            continue
        if script.scope_of(node) is not scope and id(node) not in inside:
            continue
        given = {name_of(a) for a in (*node.args, *(k.value for k in node.keywords))}
        if given & local:
            return True
        owner, _, method = name_of(node.func).rpartition(".")
        if any(f"{owner}.".startswith(f"{name}.") for name in local) and method not in SETS_UP:
            return True
    return False


def _tied(script: Script, held: str, other: str, through: ast.Call | None) -> bool:
    """One was made from the other somewhere in the file, or weights or gradients are copied between them."""
    for a, b in ((held, other), (other, held)):
        for _, value in script.named.get(a, ()):
            if b in _names(value):
                return True
    for node in script.nodes:
        if isinstance(node, ast.Call) and node is not through and {held, other} <= _names(node):
            return True
        if isinstance(node, ast.Attribute) and node.attr == "grad" and isinstance(node.ctx, ast.Store):
            return True
    return False


def _names(node: ast.AST) -> set[str]:
    return {name_of(n) for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute)}
