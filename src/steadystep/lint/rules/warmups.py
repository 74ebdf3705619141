"""SS501: a warm-up that is over before Adam's second moment has settled."""

import ast
from collections.abc import Iterator

from steadystep._utils.checklist import BETA2, TOO_SHORT, settle_steps
from steadystep.lint.context import Context, hit
from steadystep.lint.names import argument, last, name_of, path_of
from steadystep.lint.numbers import number_at, written_at
from steadystep.lint.report import Hit
from steadystep.lint.roles import ADAM_LIKE
from steadystep.lint.script import Function, Script
from steadystep.lint.targets import target_of

_PER_EPOCH = ("epoch", "epochs", "ep", "e", "cur_epoch", "current_epoch", "epoch_idx")
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_SHARE = 0.03  # of all steps: a short run has a short warm-up


def ramp_ratios(script: Script, given: ast.expr | None, at: ast.AST, depth: int = 0) -> Iterator[ast.BinOp]:
    """Of what a `LambdaLR` is given: a lambda, a function, a part of one, or one that makes a function."""
    if given is None or depth > 3:
        return
    if isinstance(given, ast.List | ast.Tuple):
        for part in given.elts:
            yield from ramp_ratios(script, part, at, depth + 1)
    elif isinstance(given, ast.Lambda):
        yield from _ramps(given.body)
        for call in (n for n in ast.walk(given.body) if isinstance(n, ast.Call)):
            function = target_of(call, script)
            if function is not None and _is_per_step(function):
                yield from _ramps(function)
    elif isinstance(given, ast.Call) and last(name_of(given.func)) == "partial" and given.args:
        yield from ramp_ratios(script, given.args[0], at, depth + 1)
    elif isinstance(given, ast.Call):
        maker = target_of(given, script)
        for inner in ast.walk(maker) if maker is not None else ():
            if isinstance(inner, _FUNCTIONS) and inner is not maker and _is_per_step(inner):
                yield from _ramps(inner)
    elif name_of(given):
        functions = [f for f in script.functions.get(last(name_of(given)), ()) if _is_per_step(f)]
        for function in functions:
            yield from _ramps(function)
        for value in [] if functions else script.values(name_of(given), at):
            yield from ramp_ratios(script, value, at, depth + 1)


def in_classes(script: Script) -> Iterator[ast.BinOp]:
    """Schedules that are a class of this file, with a `get_lr`."""
    for owner in script.classes.values():
        if not any("LRScheduler" in name_of(base) for base in owner.bases):
            continue
        for method in owner.body:
            if isinstance(method, ast.FunctionDef) and method.name == "get_lr":
                yield from _ramps(method)


def by_hand(context: Context) -> Iterator[ast.BinOp]:
    """A rate that is worked out from the step and written into the optimizer before every update."""
    script = context.script
    loops = {cycle.step.inner.node for cycle in context.cycles if cycle.step.inner is not None}
    for node in script.nodes:
        if not isinstance(node, ast.Assign) or not _writes_rate(node):
            continue
        if loops & set(script.loops_of(node)):
            for function in _sources(script, node):
                yield from (r for r in _compared(function) if _argument_is_a_step(script, function))
            yield from (r for r in _in_the_loop(script, node) if _counts_steps(r))
        else:
            writer = script.scope_of(node)
            sites = script.calls.get(writer.name, ()) if writer is not None else ()
            if writer is not None and sites and all(loops & set(script.loops_of(c)) for c in sites):
                yield from (r for r in _ramps(writer) if _counts_steps(r) and _steps_are_given(script, writer))


def divisor(ratio: ast.BinOp) -> ast.expr:
    """`N` of `step / N`, of `step / max(1, N)` and of `step / float(N)`."""
    right = ratio.right
    while isinstance(right, ast.Call) and name_of(right.func) in ("float", "int") and len(right.args) == 1:
        right = right.args[0]
    if isinstance(right, ast.Call) and name_of(right.func) == "max" and len(right.args) == 2:
        return next((a for a in right.args if not isinstance(a, ast.Constant)), right)
    return right


def _ramps(body: ast.AST) -> Iterator[ast.BinOp]:
    yield from _capped(body)
    yield from _compared(body)


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
                same = ast.dump(divisor(ratio)) == ast.dump(limit)
                if same and asked in {name_of(n) for n in ast.walk(ratio.left)}:
                    yield ratio


def _is_per_step(function: Function | ast.Lambda) -> bool:
    return not any(a.arg in _PER_EPOCH for a in function.args.args)


def _in_the_loop(script: Script, stmt: ast.Assign) -> Iterator[ast.BinOp]:
    """The rate is worked out next to where it is written, without a function."""
    yield from _capped(stmt.value)
    yield from _compared(stmt.value)
    names = [n.id for n in ast.walk(stmt.value) if isinstance(n, ast.Name)]
    for made, value in (a for name in names for a in script.assigned.get((script.scope_of(stmt), name), ())):
        if made.lineno < stmt.lineno and set(script.loops_of(made)) & set(script.loops_of(stmt)):
            yield from _capped(value)
            yield from _compared(value)
            around = script.parents.get(made)
            if isinstance(around, ast.If) and made in around.body:
                yield from _compared(ast.If(test=around.test, body=[made], orelse=[]))


def _counts_steps(ratio: ast.BinOp) -> bool:
    names = {last(name_of(n)) for n in ast.walk(ratio.left)} - {""}
    return bool(names) and not any("epoch" in n.lower() or n in _PER_EPOCH for n in names)


def _steps_are_given(script: Script, function: Function) -> bool:
    """No caller gives an epoch."""
    given = [a for c in script.calls.get(function.name, ()) for a in (*c.args, *(k.value for k in c.keywords))]
    words = {last(name_of(n)) for a in given for n in ast.walk(a)} - {""}
    return bool(words) and not any("epoch" in w.lower() or w in _PER_EPOCH for w in words)


def _writes_rate(stmt: ast.Assign) -> bool:
    target = stmt.targets[0]
    return isinstance(target, ast.Subscript) and getattr(target.slice, "value", None) == "lr"


def _sources(script: Script, stmt: ast.Assign) -> Iterator[Function]:
    values = [stmt.value]
    if isinstance(stmt.value, ast.Name):
        found = script.reaching(stmt.value.id, stmt)
        values = [found[1]] if found is not None else []
    for value in values:
        for call in ast.walk(value):
            if isinstance(call, ast.Call):
                yield from script.functions.get(last(name_of(call.func)), ())


def _argument_is_a_step(script: Script, function: Function) -> bool:
    given = [a for c in script.calls.get(function.name, ()) for a in c.args[:1]]
    words = {last(name_of(n)) for a in given for n in ast.walk(a)} - {""}
    return bool(words) and not any("epoch" in w.lower() or w in _PER_EPOCH for w in words)


def check(context: Context) -> Iterator[Hit]:
    """For every schedule that advances once per update, and for a trainer that is told how long it runs."""
    yield from _of_trainers(context)
    optimizers = [c for calls in context.script.calls.values() for c in calls if context.roles.is_optimizer(c)]
    betas = [b for b in (beta2_written(context, c) for c in optimizers) if b is not None and 0 < b < 1]
    if not betas or len(betas) != len(optimizers):
        return
    needed = settle_steps(min(betas))
    for node, given, total in _warmups(context):
        steps = number_at(given, context.script, node)
        if steps is None or not 1 < steps < TOO_SHORT * needed or (total is not None and steps >= _SHARE * total):
            continue
        message = f"a warmup of {steps:.0f} steps; with beta2 = {min(betas):g} about {needed:.0f} are needed"
        snippet = f"warmup_steps = {needed:.0f}   # or a smaller beta2, such as 0.95"
        where = written_at(given, context.script, node)
        yield hit("SS501", node if where is given else where, message, snippet=snippet)


def _of_trainers(context: Context) -> Iterator[Hit]:
    for call in (c for calls in context.script.calls.values() for c in calls):
        given = {k.arg: k.value for k in call.keywords}
        if not last(name_of(call.func)).endswith("TrainingArguments") or "adam_beta2" in given or "optim" in given:
            continue
        steps = number_at(given.get("warmup_steps"), context.script, call)
        total = number_at(given.get("max_steps"), context.script, call)
        if steps is None or total is None or not 1 < steps < min(TOO_SHORT * settle_steps(BETA2), 0.002 * total):
            continue
        message = f"a warmup of {steps:.0f} steps of {total:.0f}; about {settle_steps(BETA2):.0f} are needed"
        yield hit("SS501", given["warmup_steps"], message, snippet=f"warmup_steps={settle_steps(BETA2):.0f}")


def beta2_written(context: Context, optimizer: ast.Call) -> float | None:
    """None for optimizers without a second moment, or when the file does not say."""
    if last(context.script.full(optimizer.func)) not in ADAM_LIKE:
        return None
    betas = next((k.value for k in optimizer.keywords if k.arg == "betas"), None)
    if betas is None:
        return BETA2
    written = [betas] if isinstance(betas, ast.Tuple | ast.List) else context.script.values(path_of(betas), optimizer)
    pairs = [b for b in written if isinstance(b, ast.Tuple | ast.List) and len(b.elts) == 2]
    found = {number_at(pair.elts[1], context.script, optimizer) for pair in pairs}
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
                yield call, given, number_at(argument(call, 3 if by_name else 2, "num_training_steps"), script, call)
    if _schedule_per_step(context):
        for call in script.calls.get("LambdaLR", ()):
            for ratio in ramp_ratios(script, argument(call, 1, "lr_lambda"), call):
                yield ratio, divisor(ratio), None
        for call in script.calls.get("LinearLR", ()):
            yield from _linear(context, call)
        for ratio in in_classes(script):
            yield ratio, divisor(ratio), None
    for ratio in by_hand(context):
        yield ratio, divisor(ratio), None


def _linear(context: Context, call: ast.Call) -> Iterator[tuple[ast.AST, ast.expr, float | None]]:
    """`LinearLR(optimizer, start_factor=0.01, total_iters=N)`; one that falls is a decay."""
    first = number_at(argument(call, 1, "start_factor"), context.script, call)
    given = argument(call, 3, "total_iters")
    if given is not None and first is not None and first <= 0.5:
        yield call, given, None


def _schedule_per_step(context: Context) -> bool:
    return any(
        event.kind == "schedule" and event.inner is not None and event.inner == cycle.step.inner
        for cycle in context.cycles
        for event in cycle.events
    )
