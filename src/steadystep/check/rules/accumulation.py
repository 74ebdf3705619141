"""SS109: a group of micro-batches whose losses are not divided."""

import ast
from collections.abc import Iterator

from steadystep.check.context import Context, Cycle, hit
from steadystep.check.events import Event, implied
from steadystep.check.hit import Hit
from steadystep.check.names import last, name_of
from steadystep.check.script import Script
from steadystep.check.targets import target_of

_AVERAGES = ("criterion", "loss_fn", "loss_func", "loss_function", "crit")


def check(context: Context) -> Iterator[Hit]:
    """For every step in every loop."""
    for cycle in context.cycles:
        yield from _not_divided(context, cycle)


def _not_divided(context: Context, cycle: Cycle) -> Iterator[Hit]:
    step = cycle.step
    plain = [e for e in cycle.of("backward") if not e.managed and e.inner == step.inner]
    if len(plain) != 1 or step.inner is None or any(e.kind == "opaque" for e in cycle.events):
        return
    backward = plain[0]
    extra = set(step.branch) - set(backward.branch)
    zeros = cycle.of("zero")
    if (
        not extra
        or not implied(backward, step)
        or not zeros
        or any(implied(z, backward) and z.inner == step.inner for z in zeros)
    ):
        return
    if not _counts(context.script, step) or rescales_gradients(context.script):
        return
    if backward.loss is None or not _is_mean(context.script, backward.loss, backward.node):
        return
    accumulated = _count_name(context.script, step)
    diff = ""
    if accumulated:
        text = ast.unparse(backward.loss)
        diff = (
            context.edit()
            .replace(backward.loss, f"({text} / {accumulated})" if not backward.scaled else f"{text} / {accumulated}")
            .diff()
        )
    message = "the losses of a group of micro-batches are added up, not averaged"
    yield hit("SS109", backward.node, message, diff=diff, snippet="(loss / accumulation_steps).backward()")


def _counts(script: Script, step: Event) -> bool:
    return any(_count_test(a.test) for a in script.ancestors(step.node) if isinstance(a, ast.If))


def _count_test(test: ast.expr) -> bool:
    """`(i + 1) % n == 0`, or a counter compared with a number of steps."""
    for node in ast.walk(test):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            return True
        if isinstance(node, ast.Compare) and any("accum" in name_of(n).lower() for n in (node.left, *node.comparators)):
            return True
    return False


def _count_name(script: Script, step: Event) -> str:
    for node in script.ancestors(step.node):
        for part in ast.walk(node.test) if isinstance(node, ast.If) else ():
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod):
                return ast.unparse(part.right)
            if isinstance(part, ast.Compare) and "accum" in name_of(part.comparators[0]).lower():
                return ast.unparse(part.comparators[0])
    return ""


def rescales_gradients(script: Script) -> bool:
    """Whether gradients are divided or multiplied by hand."""
    for node in script.nodes:
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute) and node.target.attr == "grad":
            return True
    for name in ("div_", "mul_", "multiply_grads"):
        if any("grad" in ast.unparse(call.func) for call in script.calls.get(name, ())):
            return True
    return False


def _is_mean(script: Script, loss: ast.expr, at: ast.AST) -> bool:
    """The loss comes straight from something that averages; anything divided, weighted or unknown is left alone."""
    seen: set[str] = set()
    while True:
        name = name_of(loss)
        if isinstance(loss, ast.Name) and name not in seen:
            seen.add(name)
            found = script.reaching(name, at)
            changed = [n for n in script.nodes if isinstance(n, ast.AugAssign) and name_of(n.target) == name]
            if found is None or changed:
                return False
            at, loss = found
        elif isinstance(loss, ast.Subscript) or (isinstance(loss, ast.Attribute) and loss.attr == "loss"):
            loss = loss.value
        elif isinstance(loss, ast.Call):
            return _averages(script, loss)
        else:
            return False


def _averages(script: Script, call: ast.Call, depth: int = 0) -> bool:
    full = script.full(call.func)
    if any(k.arg == "reduction" for k in call.keywords) or any("accum" in ast.unparse(a) for a in call.args):
        return False
    if full.startswith("torch.nn.functional."):
        return True
    leaf = last(full)
    made = script.values(name_of(call.func), call)
    if any(isinstance(v, ast.Call) and any(k.arg == "reduction" for k in v.keywords) for v in made):
        return False
    if made and all(_is_torch_loss(script, v) for v in made):
        return True
    function = target_of(call, script)
    if function is not None and depth < 2:
        returns = [n.value for n in ast.walk(function) if isinstance(n, ast.Return)]
        return bool(returns) and all(isinstance(r, ast.Call) and _averages(script, r, depth + 1) for r in returns)
    return leaf.lower() in _AVERAGES or (leaf in ("model", "net") and leaf not in script.functions)


def _is_torch_loss(script: Script, value: ast.expr) -> bool:
    full = script.full(value.func) if isinstance(value, ast.Call) else ""
    return full.startswith("torch.nn.") and full.endswith("Loss")
