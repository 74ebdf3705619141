"""SS501: a warm-up that is over before Adam's second moment has settled."""

import ast
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.hit import Hit
from steadystep.lint.names import argument, last, name_of, path_of
from steadystep.lint.numbers import number, written_at
from steadystep.lint.roles import ADAM_LIKE
from steadystep.lint.rules.ramps import by_hand, divisor, in_classes, ratios

BETA2 = 0.999  # what torch's Adam has
TOO_SHORT = 0.05  # of 2 / (1 - beta2): good scripts for fine-tuning have a tenth of it, so only far below is a fault
_SHARE = 0.03  # of all steps: a short run has a short warm-up


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
    written = [betas] if isinstance(betas, ast.Tuple | ast.List) else context.script.values(path_of(betas), optimizer)
    pairs = [b for b in written if isinstance(b, ast.Tuple | ast.List) and len(b.elts) == 2]
    found = {number(pair.elts[1], context.script, optimizer) for pair in pairs}
    return found.pop() if len(found) == 1 and len(pairs) == len(written) else None


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
            for ratio in ratios(script, argument(call, 1, "lr_lambda"), call):
                yield ratio, divisor(ratio), None
        for call in script.calls.get("LinearLR", ()):
            yield from _linear(context, call)
        for ratio in in_classes(script):
            yield ratio, divisor(ratio), None
    for ratio in by_hand(context):
        yield ratio, divisor(ratio), None


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
