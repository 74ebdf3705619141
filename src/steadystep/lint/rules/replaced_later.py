"""SS601 in a class: one method makes the optimizer, and another puts a new network in the place of the one it holds."""

import ast
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.hit import Hit
from steadystep.lint.names import last, name_of, path_of
from steadystep.lint.rules.replacing import replaces
from steadystep.lint.script import Function, Script
from steadystep.lint.targets import subclasses, target_of


def check(context: Context) -> Iterator[Hit]:
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
                    message = f"{what} is made after the optimizer, which does not know it"
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
