"""Which parameters: SS601 made after the optimizer, SS602 moved after it."""

import ast
from collections.abc import Iterator, Sequence

from steadystep.check.context import Context, hit
from steadystep.check.edits import can_move, source_of
from steadystep.check.hit import Hit
from steadystep.check.names import calls_in, last, name_of
from steadystep.check.roles import makes_module
from steadystep.check.script import Script

_NEW_FROM_OLD = ("FSDP", "FullyShardedDataParallel", "deepcopy", "get_peft_model")
_GROWS = ("resize_token_embeddings", "add_adapter")


def check(context: Context) -> Iterator[Hit]:
    """Both."""
    for calls in list(context.script.calls.values()):
        for call in calls:
            if context.roles.is_optimizer(call) and context.roles.model_of(call):
                yield from _after(context, call, context.roles.model_of(call))


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
            diff = _made_later(context, made, stmt)
            what = ast.unparse(stmt.targets[0]) if isinstance(stmt, ast.Assign) else model
            yield hit(
                "SS601", stmt, f"{what} is made after the optimizer, which does not know it", diff=diff, snippet=_FIRST
            )
        elif _moves(stmt, model):
            diff = _made_later(context, made, stmt)
            yield hit(
                "SS602", stmt, f"{model} is moved to its device after the optimizer was made", diff=diff, snippet=_FIRST
            )


def _made_later(context: Context, made: ast.Assign, stmt: ast.stmt) -> str:
    """The optimizer below what it has to hold; empty where something between the two needs it."""
    script, optimizer = context.script, name_of(made.targets[0])
    rest = _rest_of_block(script, made)
    between = rest[: list(rest).index(stmt)]
    needed = any(name_of(n) == optimizer for s in between for n in ast.walk(s))
    if needed or not can_move(made, stmt, script):
        return ""
    return context.edit().remove(made).put_after(stmt, *source_of(made, script)).diff()


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


_FIRST = "model = ...   # all of it, on its device\noptimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)"
