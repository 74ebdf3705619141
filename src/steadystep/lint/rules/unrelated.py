"""SS604 by what runs: an optimizer none of whose networks is run with gradients in the loop that steps it."""

import ast
from collections.abc import Iterator

from steadystep.lint.context import Context, Cycle, hit
from steadystep.lint.events import Event
from steadystep.lint.hit import Hit
from steadystep.lint.names import path_of
from steadystep.lint.networks import Network, identity, related
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
    mine = identity(script, network)
    for node in script.nodes:  # a method that may run it, or a part of it such as `table.weight`
        other = path_of(node.value) if isinstance(node, ast.Attribute) and node.attr not in SETS_UP else ""
        if other and mine & identity(script, Network(other, node)):
            return True
    for calls in list(script.calls.values()):
        for call in calls:
            for given in (*call.args, *(k.value for k in call.keywords)):
                taken = path_of(given) and mine & identity(script, Network(path_of(given), call))
                if taken and target_of(call, script) is None and not _is_harmless(script, call):
                    return True
    return False


def _is_harmless(script: Script, call: ast.Call) -> bool:
    leaf = call.func.attr if isinstance(call.func, ast.Attribute) else path_of(call.func)
    return leaf in ("deepcopy", "print", "len", "id", "zip", "save", "isinstance", "type", "append")
