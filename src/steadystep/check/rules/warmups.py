"""SS501: a warm-up that is over before Adam's second moment has settled."""

import ast
from collections.abc import Iterator

from steadystep.check.context import Context, hit
from steadystep.check.hit import Hit
from steadystep.check.names import argument, last, name_of
from steadystep.check.roles import ADAM_LIKE, number, written_at
from steadystep.check.script import Function

BETA2 = 0.999  # what torch's Adam has
TOO_SHORT = 0.05  # of 2 / (1 - beta2): good scripts for fine-tuning have a tenth of it, so only far below is a fault
_SHARE = 0.03  # of all steps: a short run has a short warm-up
_PER_EPOCH = ("epoch", "epochs", "ep", "e")


def check(context: Context) -> Iterator[Hit]:
    """For every schedule that advances once per update, and for a trainer that is told how long it runs."""
    yield from _of_trainers(context)
    optimizers = [c for calls in context.script.calls.values() for c in calls if context.roles.is_optimizer(c)]
    betas = [b for b in (beta2_of(context, c) for c in optimizers) if b is not None and 0 < b < 1]
    if not betas or len(betas) != len(optimizers):
        return
    needed = settle_steps(min(betas))
    for node, given, total in _warmups(context):
        steps = number(given, context.script, node)
        if steps is None or not 1 < steps < TOO_SHORT * needed or (total is not None and steps >= _SHARE * total):
            continue
        message = f"a warm-up of {steps:.0f} steps; with beta2 = {min(betas):g} about {needed:.0f} are needed"
        snippet = f"warmup_steps = {needed:.0f}   # or a smaller beta2, such as 0.95"
        where = written_at(given, context.script, node)
        yield hit("SS501", node if where is given else where, message, snippet=snippet)


def _of_trainers(context: Context) -> Iterator[Hit]:
    for call in (c for calls in context.script.calls.values() for c in calls):
        given = {k.arg: k.value for k in call.keywords}
        if not last(name_of(call.func)).endswith("TrainingArguments") or "adam_beta2" in given or "optim" in given:
            continue
        steps = number(given.get("warmup_steps"), context.script, call)
        total = number(given.get("max_steps"), context.script, call)
        if steps is None or total is None or not 1 < steps < min(TOO_SHORT * settle_steps(BETA2), 0.002 * total):
            continue
        message = f"a warm-up of {steps:.0f} steps of {total:.0f}; about {settle_steps(BETA2):.0f} are needed"
        yield hit("SS501", given["warmup_steps"], message, snippet=f"warmup_steps={settle_steps(BETA2):.0f}")


def settle_steps(beta2: float) -> float:
    """Steps that Adam's second moment takes to settle (Ma and Yarats 2019)."""
    return 2.0 / max(1.0 - beta2, 1e-9)


def beta2_of(context: Context, optimizer: ast.Call) -> float | None:
    """None for optimizers without a second moment, or when the file does not say."""
    if last(context.script.full(optimizer.func)) not in ADAM_LIKE:
        return None
    betas = next((k.value for k in optimizer.keywords if k.arg == "betas"), None)
    if betas is None:
        return BETA2
    if isinstance(betas, ast.Tuple | ast.List) and len(betas.elts) == 2:
        return number(betas.elts[1], context.script, optimizer)
    return None


def _warmups(context: Context) -> Iterator[tuple[ast.AST, ast.expr, float | None]]:
    """(where, warm-up steps, total steps) of schedules that advance once per update."""
    script = context.script
    for name, calls in list(script.calls.items()):
        if not (name.startswith("get_") and name.endswith("_with_warmup")) and name != "get_scheduler":
            continue
        for call in calls:
            by_name = name == "get_scheduler"
            given = argument(call, 2 if by_name else 1, "num_warmup_steps")
            if given is not None:
                yield call, given, number(argument(call, 3 if by_name else 2, "num_training_steps"), script, call)
    if _schedule_per_step(context):
        for call in script.calls.get("LambdaLR", ()):
            for ratio in _ratios(context, argument(call, 1, "lr_lambda")):
                yield ratio, ratio.right, None
        for call in script.calls.get("LinearLR", ()):
            yield from _linear(context, call)
    for ratio in _by_hand(context):
        yield ratio, ratio.right, None


def _linear(context: Context, call: ast.Call) -> Iterator[tuple[ast.AST, ast.expr, float | None]]:
    """`LinearLR(optimizer, start_factor=0.01, total_iters=N)`; one that falls is a decay."""
    first = number(argument(call, 1, "start_factor"), context.script, call)
    given = argument(call, 3, "total_iters")
    if given is not None and first is not None and first <= 0.5:
        yield call, given, None


def _schedule_per_step(context: Context) -> bool:
    return any(
        event.kind == "schedule" and event.inner is not None and event.inner == cycle.step.inner
        for cycle in context.cycles
        for event in cycle.events
    )


def _ratios(context: Context, given: ast.expr | None) -> Iterator[ast.BinOp]:
    """`step / N` inside `min(1.0, ...)`, or returned `if step < N`: the usual ways to write a warm-up."""
    if isinstance(given, ast.Lambda):
        yield from _capped(given.body)
        yield from _compared(given.body)
    elif given is not None:
        for function in context.script.functions.get(name_of(given), ()):
            yield from _capped(function)
            yield from _compared(function)


def _capped(body: ast.AST) -> Iterator[ast.BinOp]:
    for node in ast.walk(body):
        if isinstance(node, ast.Call) and name_of(node.func) == "min":
            one = any(isinstance(a, ast.Constant) and a.value in (1, 1.0) for a in node.args)
            yield from (a for a in node.args if one and isinstance(a, ast.BinOp) and isinstance(a.op, ast.Div))


def _compared(body: ast.AST) -> Iterator[ast.BinOp]:
    """`if step < N: return (step + 1) / N`, as a statement or as an expression."""
    for node in ast.walk(body):
        if not isinstance(node, ast.If | ast.IfExp) or not isinstance(node.test, ast.Compare):
            continue
        limit, asked = node.test.comparators[0], name_of(node.test.left)
        below = len(node.test.ops) == 1 and isinstance(node.test.ops[0], ast.Lt | ast.LtE)
        if not below or not asked or asked in _PER_EPOCH:
            continue
        for part in node.body if isinstance(node, ast.If) else [node.body]:
            for ratio in ast.walk(part):
                if not isinstance(ratio, ast.BinOp) or not isinstance(ratio.op, ast.Div):
                    continue
                if _same(_divisor(ratio), limit) and asked in {name_of(n) for n in ast.walk(ratio.left)}:
                    yield ratio


def _divisor(ratio: ast.BinOp) -> ast.expr:
    """`N` of `step / N` and of `step / max(1, N)`."""
    right = ratio.right
    if isinstance(right, ast.Call) and name_of(right.func) == "max" and len(right.args) == 2:
        return next((a for a in right.args if not isinstance(a, ast.Constant)), right)
    return right


def _same(a: ast.expr, b: ast.expr) -> bool:
    return ast.dump(a) == ast.dump(b)


def _by_hand(context: Context) -> Iterator[ast.BinOp]:
    """A rate that a function of the step gives, and that is written into the optimizer before every update."""
    script = context.script
    loops = {cycle.step.inner.node for cycle in context.cycles if cycle.step.inner is not None}
    for node in script.nodes:
        if not isinstance(node, ast.Assign) or not _writes_rate(node) or not loops & set(script.loops_of(node)):
            continue
        for function in _sources(context, node):
            yield from (r for r in _compared(function) if _argument_is_a_step(context, function))


def _writes_rate(stmt: ast.Assign) -> bool:
    target = stmt.targets[0]
    return isinstance(target, ast.Subscript) and getattr(target.slice, "value", None) == "lr"


def _sources(context: Context, stmt: ast.Assign) -> Iterator[Function]:
    script = context.script
    values = [stmt.value]
    if isinstance(stmt.value, ast.Name):
        found = script.reaching(stmt.value.id, stmt)
        values = [found[1]] if found is not None else []
    for value in values:
        for call in ast.walk(value):
            if isinstance(call, ast.Call):
                yield from script.functions.get(last(name_of(call.func)), ())


def _argument_is_a_step(context: Context, function: Function) -> bool:
    given = [a for c in context.script.calls.get(function.name, ()) for a in c.args[:1]]
    words = {last(name_of(n)) for a in given for n in ast.walk(a)} - {""}
    return bool(words) and not any("epoch" in w.lower() or w in _PER_EPOCH for w in words)
