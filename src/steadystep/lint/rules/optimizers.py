"""Optimizers with rules of their own: SS111 stepped in backward, SS112 schedule-free, SS605 Muon."""

import ast
import re
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.names import argument, last, name_of, path_of
from steadystep.lint.report import Hit
from steadystep.lint.script import Script
from steadystep.lint.sources import sources

_MUON = ("Muon", "SingleDeviceMuon")
_OTHERS = re.compile(r"adam|sgd|lion|adagrad|rmsprop|shampoo|soap|lamb", re.I)
_TWO = ("ndim", "dim", "shape", "size", "ndimension")


def check(context: Context) -> Iterator[Hit]:
    """All three."""
    yield from _clipped_too_late(context)
    yield from _schedule_free(context)
    yield from _rest_untrained(context)


def _clipped_too_late(context: Context) -> Iterator[Hit]:
    """A hook steps each parameter as soon as its gradient is there; a clip after backward finds nothing to do."""
    script = context.script
    hooks = [c for c in script.calls.get("register_post_accumulate_grad_hook", ()) if _steps(script, c)]
    hooks += [c for c in script.calls.get("_apply_optimizer_in_backward", ()) if c.args]
    always = [c for c in hooks if not any(isinstance(a, ast.If) for a in script.ancestors(c))]
    scopes = {f for c in hooks for f in _hook_functions(script, c)}
    if not always:
        return
    for clip in context.events("clip"):
        if clip.loops and script.scope_of(clip.node) not in scopes and not clip.branch:
            message = "gradients are clipped after hooks have stepped in backward()"
            yield hit("SS111", clip.node, message, snippet=_IN_THE_HOOK)
            return


def _hook_functions(script: Script, call: ast.Call) -> list[ast.AST]:
    given = call.args[0] if call.args else None
    if isinstance(given, ast.Lambda):
        return [given]
    if isinstance(given, ast.Call):
        given = given.func  # a function that makes the hook
    return list(script.functions.get(last(name_of(given)), ())) if given is not None else []


def _steps(script: Script, call: ast.Call) -> bool:
    """The hook, or what it is made by, steps an optimizer."""
    inside = [n for f in _hook_functions(script, call) for n in ast.walk(f) if isinstance(n, ast.Attribute)]
    return any(n.attr == "step" for n in inside)


def _schedule_free(context: Context) -> Iterator[Hit]:
    script = context.script
    made = [c for name, calls in script.calls.items() if "ScheduleFree" in name for c in calls]
    made = [c for c in made if isinstance(script.parents.get(c), ast.Assign)]
    if not made or not context.cycles or "Trainer" in script.calls:
        return
    switched = {mode: _switched(context, mode, made) for mode in ("train", "eval")}
    name = path_of(getattr(script.parents[made[0]], "targets", [None])[0]) or "optimizer"
    models = [c for c in script.calls.get("train", ()) if isinstance(script.parents.get(c), ast.Expr)]
    if not switched["train"]:
        diff = ""
        if len(models) == 1 and script.scope_of(models[0]) is script.scope_of(made[0]):
            diff = context.edit().put_after(script.stmt_of(models[0]), f"{name}.train()").diff()
        message = f"{name}.train() is never called, which a schedule-free optimizer needs before its steps"
        yield hit("SS112", made[0], message, diff=diff, snippet=f"model.train()\n{name}.train()")
    elif not switched["eval"]:
        for event in context.events("eval"):
            message = f"{name}.eval() is never called: the evaluation sees the weights of the steps, not their average"
            yield hit("SS112", event.node, message, snippet=f"model.eval()\n{name}.eval()")
            return


def _switched(context: Context, mode: str, made: list[ast.Call]) -> bool:
    """An optimizer is put into a mode, by whatever name; a loop over several things may do it too."""
    script = context.script
    for call in script.calls.get(mode, ()):
        owner = path_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        if context.roles.of(owner, call) == "optimizer" or any(v in made for v, _ in sources(script, call.func)):
            return True
        names = {t for c in made for t in [last(path_of(getattr(script.parents[c], "targets", [None])[0]))]}
        if last(owner) in names or any(isinstance(a, ast.For) and _is_target(a, owner) for a in script.ancestors(call)):
            return True
    return False


def _is_target(loop: ast.For, owner: str) -> bool:
    return owner in {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}


def _rest_untrained(context: Context) -> Iterator[Hit]:
    """Muon takes matrices only; biases, norms and embeddings need an optimizer of their own."""
    script = context.script
    calls = [c for name in _MUON for c in script.calls.get(name, ())]
    if not calls or not context.cycles:
        return
    words = {*script.calls, *script.imports, *(n.arg for n in script.nodes if isinstance(n, ast.keyword) and n.arg)}
    if any(_OTHERS.search(word) for word in words):
        return
    for call in calls:
        params = argument(call, 0, "params")
        made = [v for v, _ in sources(script, params)] if params is not None else []
        if len(calls) == 1 and made and all(_is_matrices(v) for v in made):
            message = "Muon is given the matrices only, and no optimizer the rest: biases and norms stay as they are"
            yield hit("SS605", call, message, snippet=_BOTH)


def _is_matrices(value: ast.expr) -> bool:
    """`[p for p in model.parameters() if p.ndim >= 2]`."""
    if isinstance(value, ast.Call) and name_of(value.func) in ("list", "filter") and value.args:
        asked = value.args[0].body if isinstance(value.args[0], ast.Lambda) else None
        return _asks_for_two(asked) if asked is not None else _is_matrices(value.args[0])
    if not isinstance(value, ast.ListComp | ast.GeneratorExp):
        return False
    return any(_asks_for_two(test) for g in value.generators for test in g.ifs)


def _asks_for_two(test: ast.expr) -> bool:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(_asks_for_two(part) for part in test.values)
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.comparators[0], ast.Constant):
        return False
    words = {n.attr for n in ast.walk(test.left) if isinstance(n, ast.Attribute)}
    wanted = {ast.Eq: 2, ast.GtE: 2, ast.Gt: 1}.get(type(test.ops[0]))
    return bool(words & set(_TWO)) and wanted is not None and test.comparators[0].value == wanted


_IN_THE_HOOK = """def hook(p):
    torch.nn.utils.clip_grad_norm_([p], 1.0)   # per parameter, before its step
    optimizers[p].step()
    optimizers[p].zero_grad()"""
_BOTH = """muon = Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)
adamw = torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=3e-4)"""
