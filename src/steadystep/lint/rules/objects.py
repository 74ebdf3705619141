"""Which parameters: SS601 made after the optimizer, SS602 moved after it."""

import ast
from collections.abc import Iterator, Sequence

from steadystep.lint.context import Context, can_move, hit, source_of
from steadystep.lint.names import calls_in, last, name_of, parameters, passed, path_of
from steadystep.lint.report import Hit
from steadystep.lint.rules.replacing import replaces
from steadystep.lint.script import Function, Script
from steadystep.lint.targets import subclasses, target_of

_FIRST = "model = ...   # the whole model, on its device\noptimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)"


def check(context: Context) -> Iterator[Hit]:
    """Both."""
    for calls in list(context.script.calls.values()):
        for call in calls:
            if context.roles.is_optimizer(call) and context.roles.model_of(call):
                yield from _after(context, call, context.roles.model_of(call))
                yield from _after_a_function(context, call, context.roles.model_of(call))


def _after_a_function(context: Context, optimizer: ast.Call, model: str) -> Iterator[Hit]:
    """`optimizer = make_optimizer(model)`, where a function of this file makes it and gives it back."""
    script = context.script
    function = script.scope_of(optimizer)
    if function is None or not isinstance(script.stmt_of(optimizer), ast.Return) or model not in parameters(function):
        return
    names = parameters(function)
    position = names.index(model) - (1 if names[:1] in (["self"], ["cls"]) else 0)
    for call in script.calls.get(function.name, ()):
        given = passed(call, position, model)
        if given is not None and path_of(given) and target_of(call, script) is function:
            yield from _after(context, call, path_of(given))


def _after(context: Context, optimizer: ast.Call, model: str) -> Iterator[Hit]:
    """What happens to the model between the optimizer and the training, in the same block."""
    script = context.script
    made = script.stmt_of(optimizer)
    rest = _rest_of_block(script, made)
    if not isinstance(made, ast.Assign) or _learns_of_it_later(rest):
        return
    found: list[Hit] = []
    for stmt in rest:
        if _optimizer_again(context, stmt, made, model):
            return
        if isinstance(stmt, ast.For) and not _goes_back(stmt) and replaces(script, stmt, model):
            message = f"parts of {model} are created after the optimizer, which does not hold them"
            found.append(hit("SS601", stmt, message, snippet=_FIRST))
            continue
        if _trains(stmt) or _hands_on(context, stmt, made):
            break
        if isinstance(stmt, ast.If | ast.With):
            inner = [s for s in ast.walk(stmt) if isinstance(s, ast.Assign | ast.Expr)]
            later = next((s for s in inner if replaces(script, s, model)), None)
            if later is not None:
                message = f"{ast.unparse(later).split(' = ')[0]} is created after the optimizer, which does not hold it"
                found.append(hit("SS601", later, message, snippet=_FIRST))
            continue
        if not isinstance(stmt, ast.Assign | ast.Expr):
            continue
        diff = _made_later(context, made, stmt)
        if replaces(script, stmt, model):
            what = ast.unparse(stmt.targets[0]) if isinstance(stmt, ast.Assign) else f"a part of {model}"
            message = f"{what} is created after the optimizer, which does not hold it"
            found.append(hit("SS601", stmt, message, diff=diff, snippet=_FIRST))
        elif _moves(stmt, model):
            message = f"{model} is moved to its device after the optimizer was created"
            found.append(hit("SS602", stmt, message, diff=diff, snippet=_FIRST))
    yield from found


def _learns_of_it_later(rest: Sequence[ast.stmt]) -> bool:
    words = {n.attr for stmt in rest for n in ast.walk(stmt) if isinstance(n, ast.Attribute)}
    return bool(words & {"add_param_group", "param_groups"})


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


def _trains(stmt: ast.stmt) -> bool:
    if isinstance(stmt, ast.For | ast.AsyncFor | ast.While) and not _only_freezes(stmt):
        return True
    return isinstance(stmt, ast.Return) or any(
        "train" in last(name_of(c.func)) or "fit" in last(name_of(c.func)) for c in calls_in(stmt) if not _mode(c)
    )


def _goes_back(loop: ast.For) -> bool:
    return any(isinstance(n, ast.Attribute) and n.attr in ("backward", "step") for n in ast.walk(loop))


def _only_freezes(loop: ast.For | ast.AsyncFor | ast.While) -> bool:
    """`for p in model.parameters(): p.requires_grad = False`."""
    return all("requires_grad" in ast.unparse(stmt) for stmt in loop.body)


def _hands_on(context: Context, stmt: ast.stmt, made: ast.Assign) -> bool:
    """The optimizer is given to somebody who may train with it; a schedule does not."""
    optimizer = name_of(made.targets[0])
    calls = [c for c in calls_in(stmt) if context.roles.made_by(c) != "scheduler"]
    return any(optimizer and optimizer in {name_of(a) for a in c.args} for c in calls)


def _mode(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in ("train", "from_pretrained")


def _optimizer_again(context: Context, stmt: ast.stmt, made: ast.Assign, model: str) -> bool:
    """Another optimizer of this network, or of one that is not known, is made before the training."""
    for call in calls_in(stmt):
        if context.roles.is_optimizer(call):
            held = context.roles.networks_of(call)
            if held is None or any(f"{a}.".startswith(f"{b}.") for n in held for a, b in ((n, model), (model, n))):
                return True
    names = {path_of(t) for t in made.targets} - {""}
    return isinstance(stmt, ast.Assign) and bool(names & {path_of(n) for t in stmt.targets for n in ast.walk(t)})


def _moves(stmt: ast.stmt, model: str) -> bool:
    call = stmt.value if isinstance(stmt, ast.Assign | ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or name_of(call.func.value) != model:
        return False
    if isinstance(stmt, ast.Assign) and name_of(stmt.targets[0]) != model:
        return False
    if call.func.attr == "cuda":
        return True
    return call.func.attr == "to" and bool(call.args) and "cpu" not in ast.unparse(call.args[0])


def check_replaced_later(context: Context) -> Iterator[Hit]:
    """For every optimizer that is made once in a class."""
    script = context.script
    for calls in list(script.calls.values()):
        for call in calls:
            stmt = script.stmt_of(call) if context.roles.is_optimizer(call) else None
            name = path_of(stmt.targets[0]) if isinstance(stmt, ast.Assign) else ""
            model = context.roles.model_of(call) if name.startswith("self.") else ""
            model = _own(script, model, call) if model else ""
            if model and stmt is not None:
                yield from _judge(context, stmt, name, model)


def _own(script: Script, model: str, at: ast.AST) -> str:
    """`self.model`, also where the optimizer was given `model` next to `self.model = model`."""
    if model.startswith("self."):
        return model
    owner = script.class_of(at)
    for name, assigned in script.named.items():
        if name.startswith("self.") and any(path_of(v) == model and script.class_of(s) is owner for s, v in assigned):
            return name
    return ""


def _judge(context: Context, made: ast.stmt, optimizer: str, model: str) -> Iterator[Hit]:
    script, maker, owner = context.script, context.script.scope_of(made), context.script.class_of(made)
    again = [s for s, _ in script.named.get(optimizer, ()) if s is not made]
    if owner is None or maker is None or again or "add_param_group" in script.calls:
        return
    stepped = {last(e.local if e.kind == "step" else e.subject) for e in context.events("step", "scaler-step")}
    if optimizer[5:] not in stepped:
        return
    for holder in (owner, *subclasses(script, owner)):
        for method in (m for m in holder.body if isinstance(m, ast.FunctionDef) and m is not maker):
            late = _after_super(method) if method.name == maker.name else method.body
            if method.name != maker.name and not _runs_after(script, method, maker):
                continue
            if any(context.roles.is_optimizer(n) for n in ast.walk(method) if isinstance(n, ast.Call)):
                continue
            for stmt in (n for s in late for n in ast.walk(s) if isinstance(n, ast.Assign | ast.Expr)):
                if replaces(script, stmt, model) and not _runs(script, stmt, maker):
                    what = ast.unparse(stmt.targets[0]) if isinstance(stmt, ast.Assign) else f"a part of {model}"
                    message = f"{what} is created after the optimizer, which does not hold it"
                    yield hit("SS601", stmt, message, snippet=f"{optimizer} = ...   # again, after this line")
                    return


def _runs(script: Script, stmt: ast.stmt, maker: Function) -> bool:
    """It calls what makes the network and the optimizer together."""
    return any(isinstance(n, ast.Call) and target_of(n, script) is maker for n in ast.walk(stmt))


def _after_super(method: Function) -> list[ast.stmt]:
    """What comes after `super().__init__()`, which made the optimizer."""
    for i, stmt in enumerate(method.body):
        if any(isinstance(n, ast.Call) and name_of(n.func) == "super" for n in ast.walk(stmt)):
            return method.body[i + 1 :]
    return []


def _runs_after(script: Script, method: Function, maker: Function) -> bool:
    """Something calls it, and not before the optimizer is made."""
    sites = [c for c in script.calls.get(method.name, ()) if script.scope_of(c) is not method]
    # why: what the maker itself calls comes before the optimizer, or is seen there already
    known = [c for c in sites if script.scope_of(c) is maker]
    return bool(sites) and not known
