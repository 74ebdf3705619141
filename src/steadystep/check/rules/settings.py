"""Numbers: SS501 a warm-up too short, SS502 an odd learning rate, SS503 an absurd clip, SS505 the NaN filter."""

import ast
from collections.abc import Iterator

from steadystep.check.context import Context, hit
from steadystep.check.hit import Hit
from steadystep.check.names import argument, last, looks_like_loss, name_of
from steadystep.check.roles import ADAM_LIKE, number
from steadystep.check.script import Script

BETA2 = 0.999  # what torch's Adam has
TOO_SHORT = 0.05  # of 2 / (1 - beta2): good scripts for fine-tuning have a tenth of it, so only far below is a fault
_USUAL = {"adam": (1e-8, 0.1), "SGD": (1e-6, 30.0), "RMSprop": (1e-9, 0.1), "Lion": (1e-9, 0.03)}
_SUMMED = 1e-2  # of the least: a loss that is a sum over the batch is larger by its size, gradients too
_RAISE = ("OneCycleLR", "CyclicLR", "LambdaLR", "MultiplicativeLR", "ExponentialLR", "LRFinder", "lr_find", "find_lr")
_CLIP = (1e-4, 1e3)
_MEASURES_ONLY = 1e8  # limits like 1e9 or inf are the idiom for reading the norm


def check(context: Context) -> Iterator[Hit]:
    """All four."""
    yield from _short_warmups(context)
    yield from _odd_rates(context)
    yield from _absurd_clips(context)
    for call in context.script.calls.get("TrainingArguments", ()):
        for keyword in call.keywords:
            if keyword.arg == "logging_nan_inf_filter" and getattr(keyword.value, "value", None) is True:
                diff = context.edit().replace(keyword.value, "False").diff()
                yield hit("SS505", keyword, "logging_nan_inf_filter=True hides NaN and infinity in the log", diff=diff)


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


def _short_warmups(context: Context) -> Iterator[Hit]:
    optimizers = [c for calls in context.script.calls.values() for c in calls if context.roles.is_optimizer(c)]
    betas = [b for b in (beta2_of(context, c) for c in optimizers) if b is not None and 0 < b < 1]
    if not betas or len(betas) != len(optimizers):
        return
    needed = settle_steps(min(betas))
    for node, steps, total in _warmups(context):
        if not 0 < steps < TOO_SHORT * needed or (total is not None and steps >= 0.03 * total):
            continue
        message = f"a warm-up of {steps:.0f} steps; with beta2 = {min(betas):g} about {needed:.0f} are needed"
        yield hit("SS501", node, message, snippet=f"warmup_steps = {needed:.0f}   # or a smaller beta2, such as 0.95")


def _warmups(context: Context) -> Iterator[tuple[ast.AST, float, float | None]]:
    """(where, warm-up steps, total steps) of schedules that advance once per update."""
    script = context.script
    for name, calls in list(script.calls.items()):
        if not (name.startswith("get_") and name.endswith("_with_warmup")) and name != "get_scheduler":
            continue
        for call in calls:
            by_name = name == "get_scheduler"
            given = argument(call, 2 if by_name else 1, "num_warmup_steps")
            steps = number(given, script, call)
            if steps is not None:
                yield call, steps, number(argument(call, 3 if by_name else 2, "num_training_steps"), script, call)
    if not _schedule_per_step(context):
        return
    for call in script.calls.get("LambdaLR", ()):
        for ratio in _ratios(context, argument(call, 1, "lr_lambda")):
            steps = number(ratio.right, script, ratio)
            if steps is not None and steps > 1:
                yield ratio, steps, None


def _schedule_per_step(context: Context) -> bool:
    return any(
        event.kind == "schedule" and event.inner is not None and event.inner == cycle.step.inner
        for cycle in context.cycles
        for event in cycle.events
    )


def _ratios(context: Context, given: ast.expr | None) -> Iterator[ast.BinOp]:
    """`step / N` inside `min(1.0, ...)`: the usual way to write a warm-up."""
    body: list[ast.AST] = []
    if isinstance(given, ast.Lambda):
        body = [given.body]
    elif given is not None:
        body = list(context.script.functions.get(name_of(given), ()))
    for part in body:
        for node in ast.walk(part):
            if isinstance(node, ast.Call) and name_of(node.func) == "min":
                one = any(isinstance(a, ast.Constant) and a.value in (1, 1.0) for a in node.args)
                for a in node.args if one else ():
                    if isinstance(a, ast.BinOp) and isinstance(a.op, ast.Div):
                        yield a


def _odd_rates(context: Context) -> Iterator[Hit]:
    for calls in list(context.script.calls.values()):
        for call in calls:
            if not context.roles.is_optimizer(call) or not context.roles.model_of(call):
                continue
            kind = last(context.script.full(call.func))
            usual = _USUAL.get("adam" if kind in ADAM_LIKE else kind)
            rate = number(argument(call, 1, "lr"), context.script, call)
            if usual is None or rate is None or rate == 0:
                continue
            least = usual[0] * (_SUMMED if kind == "SGD" and not _averaged(context) else 1.0)
            if least <= rate <= usual[1] or (rate < least and _is_raised(context)):
                continue
            where = argument(call, 1, "lr") or call
            message = f"a learning rate of {rate:g} for {kind}: {usual[0]:g} to {usual[1]:g} is what it is used with"
            yield hit("SS502", where, message, snippet=f"lr={'1e-3' if kind in ADAM_LIKE else '0.1'}")


def _is_raised(context: Context) -> bool:
    """A first value that is not the one it trains with: warm-up from below, a range test."""
    script = context.script
    written = any(
        isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store) and getattr(n.slice, "value", None) == "lr"
        for n in script.nodes
    )
    return written or context.mentions(*_RAISE)


def _averaged(context: Context) -> bool:
    """The losses are torch's and none of them is a sum: with SGD the size of the gradient decides what a rate means."""
    script = context.script
    known = False
    for name, calls in script.calls.items():
        for call in calls:
            if any(k.arg in ("reduction", "size_average") for k in call.keywords):
                return False
            if name == "sum" and _is_for_a_loss(script, call):
                return False
            full = script.full(call.func)
            known = known or (full.startswith("torch.nn.") and full.endswith(("Loss", "_loss", "cross_entropy")))
    return known


def _is_for_a_loss(script: Script, call: ast.Call) -> bool:
    stmt = script.stmt_of(call)
    around = [a for a in script.ancestors(call) if isinstance(a, ast.Attribute)]
    if any(a.attr == "item" for a in around):
        return False
    targets = stmt.targets if isinstance(stmt, ast.Assign) else [stmt.target] if isinstance(stmt, ast.AugAssign) else []
    if any(looks_like_loss(name_of(t)) for t in targets) or "backward" in ast.unparse(stmt):
        return True
    scope = script.scope_of(call)
    return scope is not None and (looks_like_loss(scope.name) or scope.name == "forward")


def _absurd_clips(context: Context) -> Iterator[Hit]:
    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm"):
        for call in context.script.calls.get(name, ()):
            given = argument(call, 1, "max_norm", "clip_value")
            limit = number(given, context.script, call)
            if limit is None or limit <= 0 or _CLIP[0] <= limit <= _CLIP[1] or limit >= _MEASURES_ONLY:
                continue
            diff = context.edit().replace(given, "1.0").diff() if isinstance(given, ast.Constant) else ""
            verb = "never clips" if limit > _CLIP[1] else "leaves next to nothing of any gradient"
            yield hit(
                "SS503", call, f"a limit of {limit:g} {verb}; 0.5 to 5 is usual", diff=diff, snippet="max_norm=1.0"
            )
