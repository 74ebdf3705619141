"""Which parameters: SS601 made after the optimizer, SS602 moved after it, SS604 those of another network."""

import ast
from collections.abc import Iterator, Sequence

from steadystep.check.context import Context, Cycle, hit
from steadystep.check.edits import can_move, source_of
from steadystep.check.hit import Hit
from steadystep.check.names import calls_in, last, looks_like_model, name_of
from steadystep.check.roles import is_model_call, makes_module
from steadystep.check.rules.loss import under_no_grad
from steadystep.check.script import Script

_SETS_UP = (
    *("eval", "train", "to", "cuda", "cpu", "half", "float", "parameters", "named_parameters", "requires_grad_"),
    *("zero_grad", "state_dict", "load_state_dict"),
)  # fmt: skip
"""Methods of a network that do not run it."""
_NEW_FROM_OLD = ("FSDP", "FullyShardedDataParallel", "deepcopy", "get_peft_model")
_GROWS = ("resize_token_embeddings", "add_adapter")


def check(context: Context) -> Iterator[Hit]:
    """All three."""
    for calls in list(context.script.calls.values()):
        for call in calls:
            if context.roles.is_optimizer(call) and context.roles.model_of(call):
                yield from _after(context, call, context.roles.model_of(call))
    for cycle in context.cycles:
        yield from _other_network(context, cycle)


def _after(context: Context, optimizer: ast.Call, model: str) -> Iterator[Hit]:
    """What happens to the model between the optimizer and the training, in the same block."""
    script = context.script
    made = script.stmt_of(optimizer)
    rest = _rest_of_block(script, made)
    if not isinstance(made, ast.Assign):
        return
    for stmt in rest:
        if _trains(context, stmt) or _optimizer_again(context, stmt) or _hands_on(context, stmt, made):
            return
        if not isinstance(stmt, ast.Assign | ast.Expr):
            continue
        if _replaces(script, stmt, model):
            moved = source_of(made, script)
            diff = context.edit().remove(made).put_after(stmt, *moved).diff() if can_move(made, stmt, script) else ""
            what = ast.unparse(stmt.targets[0]) if isinstance(stmt, ast.Assign) else model
            yield hit("SS601", stmt, f"{what} is made after the optimizer, which does not know it", diff=diff)
        elif _moves(stmt, model):
            moved = source_of(made, script)
            diff = context.edit().remove(made).put_after(stmt, *moved).diff() if can_move(made, stmt, script) else ""
            yield hit("SS602", stmt, f"{model} is moved to its device after the optimizer was made", diff=diff)


def _rest_of_block(script: Script, stmt: ast.stmt) -> Sequence[ast.stmt]:
    parent = script.parents[stmt]
    for name in ("body", "orelse", "finalbody"):
        block = getattr(parent, name, None)
        if isinstance(block, list) and stmt in block:
            return block[block.index(stmt) + 1 :]
    return ()


def _trains(context: Context, stmt: ast.stmt) -> bool:
    if isinstance(stmt, ast.For | ast.AsyncFor | ast.While | ast.Return):
        return True
    return any(
        "train" in last(name_of(c.func)) or "fit" in last(name_of(c.func)) for c in calls_in(stmt) if not _mode(c)
    )


def _hands_on(context: Context, stmt: ast.stmt, made: ast.Assign) -> bool:
    """The optimizer is given to somebody who may train with it; a schedule does not."""
    optimizer = name_of(made.targets[0])
    calls = [c for c in calls_in(stmt) if context.roles.made_by(c) != "scheduler"]
    return any(optimizer and optimizer in {name_of(a) for a in c.args} for c in calls)


def _mode(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in ("train", "from_pretrained")


def _optimizer_again(context: Context, stmt: ast.stmt) -> bool:
    return any(context.roles.is_optimizer(c) for c in calls_in(stmt))


def _replaces(script: Script, stmt: ast.stmt, model: str) -> bool:
    if isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Call):
        owner, _, method = name_of(stmt.value.func).rpartition(".")
        return owner == model and method in _GROWS
    if not isinstance(stmt, ast.Assign) or not isinstance(stmt.value, ast.Call):
        return False
    target = name_of(stmt.targets[0])
    if target.startswith(f"{model}."):
        return makes_module(stmt.value, script) and not script.full(stmt.value.func).endswith(("Identity", "Dropout"))
    if target != model:
        return False
    leaf, given = last(script.full(stmt.value.func)), {name_of(n) for n in ast.walk(stmt.value)}
    if model in given:  # a wrapper keeps the parameters, but for those that make new ones
        return leaf in _NEW_FROM_OLD
    return makes_module(stmt.value, script) or leaf == "from_pretrained"


def _moves(stmt: ast.stmt, model: str) -> bool:
    call = stmt.value if isinstance(stmt, ast.Assign | ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or name_of(call.func.value) != model:
        return False
    if isinstance(stmt, ast.Assign) and name_of(stmt.targets[0]) != model:
        return False
    if call.func.attr == "cuda":
        return True
    return call.func.attr == "to" and bool(call.args) and "cpu" not in ast.unparse(call.args[0])


def _other_network(context: Context, cycle: Cycle) -> Iterator[Hit]:
    """The loss comes from one network by name, the optimizer has another, and nothing ties the two together."""
    script, step = context.script, cycle.step
    if step.kind != "step" or any(e.kind in ("opaque", "guard", "grad-call") for e in cycle.events):
        return
    made = context.roles.optimizer_call(step.local, step.node)
    held = context.roles.model_of(made) if made is not None else ""
    scope = script.scope_of(step.node)
    if made is None or not held or "." in held or script.scope_of(made) is not scope or len(_steps(cycle)) != 1:
        return
    used = _networks_in(script, cycle, scope)
    if held in used or not used or _passed_on(script, held, scope, made):
        return
    if any(_tied(script, held, other) for other in used):
        return
    other = sorted(used)[0]
    params = made.args[0] if made.args else None
    diff = context.edit().replace(params, f"{other}.parameters()").diff() if params is not None else ""
    yield hit("SS604", made, f"the optimizer updates {held}, the loss is computed with {other}", diff=diff)


def _steps(cycle: Cycle) -> set[str]:
    return {e.owner for e in cycle.root if e.kind in ("step", "scaler-step")}


def _networks_in(script: Script, cycle: Cycle, scope: ast.AST | None) -> set[str]:
    """Networks that are called by a plain name in the loop, outside of no_grad."""
    body: ast.AST = cycle.loop.node if cycle.loop is not None else (scope or script.tree)
    found = set()
    for node in ast.walk(body):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not is_model_call(node, script):
            continue
        if looks_like_model(node.func.id) and not under_no_grad(script, node):
            found.add(node.func.id)
    return found


def _passed_on(script: Script, model: str, scope: ast.AST | None, optimizer: ast.Call) -> bool:
    """Given to somebody who may use or wrap it, or used through an attribute or a method."""
    for node in script.nodes:
        if isinstance(node, ast.Call) and node is not optimizer and script.scope_of(node) is scope:
            given = {name_of(a) for a in (*node.args, *(k.value for k in node.keywords))}
            if model in given:
                return True
            name = name_of(node.func)
            if name.startswith(f"{model}.") and last(name) not in _SETS_UP:
                return True
    return False


def _tied(script: Script, held: str, other: str) -> bool:
    """One was made from the other somewhere in the file, or weights or gradients are copied between them."""
    for a, b in ((held, other), (other, held)):
        for _, value in script.named.get(a, ()):
            if b in {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}:
                return True
    for node in script.nodes:
        if isinstance(node, ast.Call) and {held, other} <= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}:
            return True
        if isinstance(node, ast.Attribute) and node.attr == "grad" and isinstance(node.ctx, ast.Store):
            return True
    return False
