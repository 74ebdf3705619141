"""SS109: a group of micro-batches whose losses are not divided."""

import ast
import re
from collections.abc import Iterator

from steadystep.lint.context import Context, Cycle, hit, only_goes_back
from steadystep.lint.events import Event, implied, meets
from steadystep.lint.names import last, name_of
from steadystep.lint.numbers import number_at
from steadystep.lint.report import Hit
from steadystep.lint.rules.origins import origins
from steadystep.lint.rules.zeroing import rescales_gradients
from steadystep.lint.script import Script
from steadystep.lint.targets import target_of

COUNTED = re.compile(r"accum|acc_steps|update_(freq|every|interval)|iter_size|grad_steps|virtual_b|micro", re.I)
"""Names of the number of micro-batches in a group."""

_DEEPEST = 4
_AVERAGES = ("criterion", "loss_fn", "loss_func", "loss_function", "crit")


def counting(context: Context, number: int, arm: int) -> ast.expr | None:
    """The question that lets one batch in so many through to this arm of an `if`, or None."""
    test = context.asked.get(number)
    return _counts(context.script, test, arm == 0, 0) if test is not None else None


def _counts(script: Script, test: ast.expr, wanted: bool, depth: int) -> ast.expr | None:
    """The counting part of a question, if it is `wanted` once per group."""
    if depth > _DEEPEST:
        return None
    match test:
        case ast.UnaryOp(op=ast.Not()):
            return _counts(script, test.operand, not wanted, depth + 1)
        case ast.BoolOp():
            parts = (_counts(script, part, wanted, depth + 1) for part in test.values)
            return next((part for part in parts if part is not None), None)
        case ast.Compare():
            return test if _is_count(test, wanted) or (wanted and _is_counter(script, test)) else None
        case ast.BinOp(op=ast.Mod()):
            return None if wanted else test
        case ast.NamedExpr():
            return _counts(script, test.value, wanted, depth + 1)
    answers = _answers(script, test)
    found = [_counts(script, answer, wanted, depth + 1) for answer in answers]
    return found[0] if found and all(f is not None for f in found) else None


def _answers(script: Script, test: ast.expr) -> list[ast.expr]:
    """What a name in a question stands for, or what a function that is asked gives back."""
    if isinstance(test, ast.Call):
        function = target_of(test, script)
        returns = [n for n in ast.walk(function) if isinstance(n, ast.Return)] if function is not None else []
        return [r.value for r in returns if r.value is not None]
    if isinstance(test, ast.Name):
        found = script.reaching(test.id, test)
        if found is not None:
            return [found[1]]
    return script.values(name_of(test), test)


def _is_count(test: ast.Compare, wanted: bool) -> bool:
    once = isinstance(test.ops[0], ast.Eq | ast.GtE | ast.Gt)
    parts = (test.left, *test.comparators)
    if any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod) for p in parts for n in ast.walk(p)):
        return isinstance(test.ops[0], ast.Eq) == wanted
    return any(COUNTED.search(name_of(n)) for p in parts for n in ast.walk(p)) and once == wanted


def _is_counter(script: Script, test: ast.Compare) -> bool:
    """`pending == K`, of a number that goes up by one in each pass and begins again where this is asked."""
    around = script.parents.get(test)
    if not isinstance(around, ast.If) or not isinstance(test.ops[0], ast.Eq | ast.GtE):
        return False
    name, scope = name_of(test.left), script.scope_of(test)
    up = [
        n
        for n in script.nodes
        if isinstance(n, ast.AugAssign)
        and isinstance(n.op, ast.Add)
        and name_of(n.target) == name
        and getattr(n.value, "value", None) == 1
    ]
    again = [n for s in around.body for n in ast.walk(s) if isinstance(n, ast.Assign)]
    zero = any(name in {name_of(t) for t in n.targets} and getattr(n.value, "value", None) == 0 for n in again)
    return bool(name) and zero and any(script.scope_of(n) is scope or name.startswith("self.") for n in up)


def check(context: Context) -> Iterator[Hit]:
    """For every step in every loop."""
    for cycle in context.cycles:
        yield from _not_divided(context, cycle)


def _not_divided(context: Context, cycle: Cycle) -> Iterator[Hit]:
    step = cycle.step
    yield from _inner_loop(context, cycle)
    plain = [e for e in cycle.of("backward") if not _is_divided(context, e) and e.inner == step.inner]
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
    counted = next((c for c in (counting(context, *e) for e in sorted(extra)) if c is not None), None)
    if counted is None or rescales_gradients(context.script):
        return
    many = _how_many(context.script, counted)
    if backward.loss is None or not _is_mean(context.script, backward.loss, backward.node, many):
        return
    accumulated = _count_name(context.script, counted, backward.node)
    diff = ""
    if accumulated and context.script.scope_of(backward.loss) is context.script.scope_of(backward.node):
        text = ast.unparse(backward.loss)
        diff = (
            context.edit()
            .replace(backward.loss, f"({text} / {accumulated})" if not backward.scaled else f"{text} / {accumulated}")
            .diff()
        )
    message = "the losses of the micro-batches are summed, not averaged"
    yield hit("SS109", backward.node, message, diff=diff, snippet="(loss / accumulation_steps).backward()")


def _is_divided(context: Context, backward: Event) -> bool:
    """An engine, or accelerate, may do it; fabric and `manual_backward` do not."""
    if not backward.managed:
        return False
    words = {k.arg or "**" for c in context.script.calls.get("Accelerator", ()) for k in c.keywords}
    divides = "accumulate" in context.script.calls or any("accumulation" in w or w == "**" for w in words)
    known = "Accelerator" in context.script.calls and not divides
    return not only_goes_back(context, backward, divides=known)


def _inner_loop(context: Context, cycle: Cycle) -> Iterator[Hit]:
    """`for micro in range(accumulation): loss.backward()`, and the step after that loop."""
    script, step = context.script, cycle.step
    for backward in cycle.of("backward"):
        if _is_divided(context, backward) or backward.inner is None or backward.loops[:-1] != step.loops:
            continue
        if not meets(backward, step):
            continue
        node = backward.inner.node
        head = ast.unparse(node.iter) + ast.unparse(node.target) if isinstance(node, ast.For) else ""
        counted = isinstance(node, ast.For) and isinstance(node.iter, ast.Call) and name_of(node.iter.func) == "range"
        in_parts = ".chunk(" in head or (not counted and "micro" in head.lower())
        inside = [e for e in cycle.events if backward.inner in e.loops]
        if not in_parts and not (counted and (COUNTED.search(head) or "micro" in head.lower())):
            continue
        if any(e.kind in ("zero", "step", "opaque") for e in inside) or rescales_gradients(script):
            continue
        limit = (
            node.iter.args[-1] if counted and isinstance(node, ast.For) and isinstance(node.iter, ast.Call) else None
        )
        many_of = number_at(limit, script, node) if limit is not None else None
        if backward.loss is not None and _is_mean(script, backward.loss, backward.node, many_of):
            counts = node.iter.args if isinstance(node, ast.For) and isinstance(node.iter, ast.Call) and counted else []
            many = ast.unparse(counts[0]) if len(counts) == 1 else ""
            fixed = f"{ast.unparse(backward.loss)} / {many}"
            edit = context.edit().replace(backward.loss, fixed if backward.scaled else f"({fixed})")
            message = "the losses of the micro-batches are summed, not averaged"
            snippet = "(loss / accumulation_steps).backward()"
            yield hit("SS109", backward.node, message, diff=edit.diff() if many else "", snippet=snippet)
            return


def _how_many(script: Script, test: ast.expr) -> float | None:
    """The number of micro-batches in a group, where the file says it."""
    for part in ast.walk(test):
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod):
            return number_at(part.right, script, part)
        if isinstance(part, ast.Compare) and not any(isinstance(n, ast.Mod) for n in ast.walk(part)):
            return number_at(part.comparators[0], script, part)
    return None


def _count_name(script: Script, test: ast.expr, backward: ast.AST) -> str:
    """What the losses are to be divided by, where backward can read it."""
    here = script.scope_of(test) is script.scope_of(backward)
    for part in ast.walk(test):
        name = ""
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod):
            name = ast.unparse(part.right)
        elif isinstance(part, ast.Compare) and COUNTED.search(name_of(part.comparators[0])):
            name = ast.unparse(part.comparators[0])
        if name:
            mine = name.startswith("self.") and script.class_of(test) is script.class_of(backward)
            return name if here or mine else ""
    return ""


def _is_mean(script: Script, loss: ast.expr, at: ast.AST, many: float | None = None) -> bool:
    """The loss comes straight from something that averages; anything divided, weighted or unknown is left alone."""
    seen: set[str] = set()
    while True:
        ways = origins(script, loss, at)
        if ways and not any(value is loss for _, value in ways):
            return all(_is_mean(script, value, stmt, many) for stmt, value in ways)
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
        elif isinstance(loss, ast.UnaryOp) and isinstance(loss.op, ast.USub):
            loss = loss.operand
        elif isinstance(loss, ast.BinOp) and isinstance(loss.op, ast.Div | ast.Mult):
            inner = _undivided(script, loss, many)
            if inner is None:
                return False
            loss = inner
        elif isinstance(loss, ast.BinOp):
            return _is_sum_of_means(script, loss, at, many)
        elif isinstance(loss, ast.Call):
            return _averages(script, loss)
        else:
            return False


def _undivided(script: Script, loss: ast.BinOp, many: float | None) -> ast.expr | None:
    """`loss` of `loss / 1`, and of `(a + b) / 2` where a group is known to have another number of micro-batches."""
    if isinstance(loss.op, ast.Mult):
        factor = number_at(loss.left, script, loss)
        plain = factor is not None and many is not None and abs(factor * many - 1.0) > 1e-9 and factor >= 0.1
        return loss.right if factor == 1.0 or plain else None
    divisor = number_at(loss.right, script, loss)
    other = isinstance(loss.right, ast.Constant) and many is not None and divisor != many
    unused = (
        isinstance(loss.right, ast.Name | ast.Constant) and divisor == 1.0 and many != 1.0
    )  # a default nobody changed
    return loss.left if unused or other else None


def _is_sum_of_means(script: Script, loss: ast.BinOp, at: ast.AST, many: float | None) -> bool:
    """`ce + 0.1 * aux`; a factor in front of everything may be the division."""
    if not isinstance(loss.op, ast.Add | ast.Sub) or not _is_mean(script, loss.left, at, many):
        return False
    right: ast.expr = loss.right
    if isinstance(right, ast.BinOp) and isinstance(right.op, ast.Mult) and isinstance(right.left, ast.Constant):
        right = right.right
    return _is_mean(script, right, at, many)


def _averages(script: Script, call: ast.Call, depth: int = 0) -> bool:
    full = script.full(call.func)
    if any(k.arg == "reduction" for k in call.keywords) or any("accum" in ast.unparse(a) for a in call.args):
        return False
    if full.startswith("torch.nn.functional."):
        return True
    leaf = last(full)
    if isinstance(call.func, ast.Attribute) and call.func.attr == "mean" and not call.args:
        return True
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
