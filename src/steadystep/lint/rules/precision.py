"""Mixed precision: SS201 a scaler for bf16, SS202 fp16 without one, SS203 no `update()`, SS204 a step past it."""

import ast
import re
from collections.abc import Iterator

from steadystep.lint.context import Context, Cycle, hit
from steadystep.lint.events import meets
from steadystep.lint.names import last, name_of, path_of
from steadystep.lint.report import Hit
from steadystep.lint.rules.dtypes import BF16, FP16, always_on, cast_networks, casts_of, dtype_of, may_be_on
from steadystep.lint.rules.loss import under_no_grad
from steadystep.lint.rules.zeroing import rescales_gradients
from steadystep.lint.script import Script

_SCALES = re.compile(r"scaler|(loss|grad)_?scal|scale_?(loss|grad)", re.I)
_OF_FEATURES = ("StandardScaler", "MinMaxScaler", "RobustScaler", "MaxAbsScaler")


def check(context: Context) -> Iterator[Hit]:
    """Both."""
    casts = casts_of(context.script)
    yield from _scaler_for_bf16(context, casts)
    yield from _fp16_bare(context, casts)
    yield from _in_forward(context, casts)
    yield from _by_a_name(context, casts)
    yield from _whole_in_fp16(context)


def _scaler_for_bf16(context: Context, casts: list[ast.Call]) -> Iterator[Hit]:
    flags = {ast.dump(k.value) for c in casts for k in c.keywords if k.arg == "enabled"}
    made = [
        c
        for c in context.script.calls.get("GradScaler", ())
        if always_on(context.script, c) or {ast.dump(k.value) for k in c.keywords if k.arg == "enabled"} == flags
    ]
    whole = not casts and bool(cast_networks(context, BF16, "bfloat16"))
    if not made or not (casts or whole) or any(dtype_of(context.script, cast) != "bf16" for cast in casts):
        return
    for call in made:
        arguments = ", ".join([*(ast.unparse(a) for a in call.args), "enabled=False"])
        diff = context.edit().replace(call, f"{ast.unparse(call.func)}({arguments})").diff()
        message = "a GradScaler, but everything here runs in bfloat16: it needs none"
        yield hit("SS201", call, message, diff=diff, snippet="loss.backward()\noptimizer.step()")


def _fp16_bare(context: Context, casts: list[ast.Call]) -> Iterator[Hit]:
    if not casts or _is_scaled(context):
        return
    for root in context.roots:
        for i, event in enumerate(root):
            call = event.node
            if event.kind != "autocast" or event.no_grad or call not in casts or not isinstance(call, ast.Call):
                continue
            if dtype_of(context.script, call) != "fp16" or not may_be_on(context.script, call):
                continue
            used = [
                e for e in root[i:] if e.inner == event.inner and e.kind in ("backward", "step") and meets(e, event)
            ]
            if {"backward", "step"} <= {e.kind for e in used if not e.managed}:
                yield hit("SS202", call, "fp16 autocast without a GradScaler", snippet=_SCALED)


def _in_forward(context: Context, casts: list[ast.Call]) -> Iterator[Hit]:
    """`with autocast():` inside, or as a decorator of, the forward of a network here that is trained."""
    script = context.script
    if not casts or _is_scaled(context) or not any(_plainly_trains(c) for c in context.cycles):
        return
    for cast in casts:
        scope = script.scope_of(cast)
        if cast in {d for f in _decorated(script) for d in f.decorator_list}:
            scope = None
        around = scope if scope is not None else script.parents.get(cast)
        inside = (
            isinstance(around, ast.FunctionDef) and around.name == "forward" and script.class_of(around) is not None
        )
        if scope is None and isinstance(around, ast.FunctionDef) and not inside:
            inside = _is_trained_on(context, around)
        if inside and dtype_of(context.script, cast) == "fp16" and may_be_on(context.script, cast):
            yield hit("SS202", cast, "fp16 autocast without a GradScaler", snippet=_SCALED)


def _decorated(script: Script) -> list[ast.FunctionDef]:
    return [
        f for group in script.functions.values() for f in group if isinstance(f, ast.FunctionDef) and f.decorator_list
    ]


def _is_trained_on(context: Context, function: ast.FunctionDef) -> bool:
    """A decorated function that is called in a loop that trains, with gradients on."""
    script = context.script
    loops = {c.loop.node for c in context.cycles if c.loop is not None and _plainly_trains(c)}
    sites = [c for c in script.calls.get(function.name, ()) if not under_no_grad(script, c)]
    return any(loops & set(script.loops_of(c)) for c in sites)


def _by_a_name(context: Context, casts: list[ast.Call]) -> Iterator[Hit]:
    """`ctx = torch.autocast(...)` once, and `with ctx:` in the loop that trains."""
    script = context.script
    if not casts or _is_scaled(context):
        return
    loops = {c.loop.node for c in context.cycles if c.loop is not None and _plainly_trains(c)}
    for cast in casts:
        stmt = script.parents.get(cast)
        name = path_of(stmt.targets[0]) if isinstance(stmt, ast.Assign) else ""
        withs = [
            n for n in script.nodes if isinstance(n, ast.With) and name in {path_of(i.context_expr) for i in n.items}
        ]
        used = name and any(loops & set(script.loops_of(w)) or _is_met(context, w) for w in withs)
        if (
            used
            and len(script.named.get(name, ())) == 1
            and dtype_of(context.script, cast) == "fp16"
            and always_on(script, cast)
        ):
            yield hit("SS202", cast, "fp16 autocast without a GradScaler", snippet=_SCALED)


def _is_met(context: Context, block: ast.With) -> bool:
    """A backward of a loss that was computed in it, in the same function or in one that it hands the loss to."""
    scope = context.script.scope_of(block)
    gone_back = {context.script.scope_of(e.node) for e in context.events("backward")}
    quiet = scope is not None and any("no_grad" in ast.unparse(d) for d in scope.decorator_list)
    returns = any(isinstance(n, ast.Return) for n in ast.walk(block)) or scope in gone_back
    return scope is not None and not quiet and returns and not context.script.loops_of(block)


def _plainly_trains(cycle: Cycle) -> bool:
    return cycle.step.kind == "step" and bool(cycle.of("backward")) and not any(e.managed for e in cycle.events)


def _whole_in_fp16(context: Context) -> Iterator[Hit]:
    """`model.half()` before training, and a plain backward and step."""
    if _is_scaled(context) or context.mentions("autocast"):
        return
    for call in cast_networks(context, FP16, "half"):
        if any(_plainly_trains(c) for c in context.cycles):
            yield hit("SS202", call, "the network is trained in fp16 without a GradScaler", snippet=_SCALED)
            return


def _is_scaled(context: Context) -> bool:
    """Anything that scales the loss, or may: a scaler by its name or its methods, apex, or a factor by hand."""
    script = context.script
    words = {n.id for n in script.nodes if isinstance(n, ast.Name)} | set(script.imports)
    words |= {n.attr for n in script.nodes if isinstance(n, ast.Attribute)}
    words |= {n.arg for n in script.nodes if isinstance(n, ast.keyword | ast.arg) and n.arg}
    if any(_SCALES.search(word) and word not in _OF_FEATURES for word in words if not _is_of_features(script, word)):
        return True
    if context.mentions("unscale_", "scale_loss") or rescales_gradients(script):
        return True
    return any(e.scaled or _by_hand(script, e.loss, e.node) for e in context.events("backward"))


def _is_of_features(script: Script, word: str) -> bool:
    """`scaler = StandardScaler()` is about the data."""
    made = [value for _, value in script.named.get(word, ())]
    return bool(made) and all(isinstance(v, ast.Call) and last(script.full(v.func)) in _OF_FEATURES for v in made)


def _by_hand(script: Script, loss: ast.expr | None, at: ast.AST) -> bool:
    """`(loss * scale).backward()`, or the same an assignment earlier; a scale inside of the loss is the model's."""
    found = script.reaching(loss.id, at) if isinstance(loss, ast.Name) else None
    return _has_factor(loss) or (found is not None and _has_factor(found[1]))


def _has_factor(node: ast.expr | None) -> bool:
    if isinstance(node, ast.BinOp):
        return _has_factor(node.left) or _has_factor(node.right)
    return node is not None and "scal" in name_of(node).lower()


_SCALED = """scaler = torch.amp.GradScaler("cuda")
...
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()"""


def check_scaler_steps(context: Context) -> Iterator[Hit]:
    """Both."""
    yield from _never_updated(context)
    yield from _past_the_scaler(context)


def _never_updated(context: Context) -> Iterator[Hit]:
    updated = {last(e.local) for e in context.events("scaler-update")}
    for call in context.script.calls.get("update", ()):
        updated.add(last(name_of(call.func).rpartition(".")[0]))
    for event in context.events("scaler-step"):
        if last(event.local) not in updated:
            diff = context.edit().put_after(event.stmt, f"{event.local}.update()").diff()
            yield hit("SS203", event.node, f"{event.local}.update() is never called", diff=diff)


def _past_the_scaler(context: Context) -> Iterator[Hit]:
    if any(True for _ in context.events("scaler-step", "unscale")) or context.mentions("unscale_", "unscale_gradients"):
        return
    for cycle in context.cycles:
        step = cycle.step
        if step.kind != "step":
            continue
        before = next((e for e in cycle.before(step) if e.kind == "backward" and meets(e, step)), None)
        if before is not None and before.scaled and context.roles.of(before.local, before.node) == "scaler":
            fixed = f"{before.local}.step({step.local})"
            edit = context.edit().replace(step.node, fixed)
            if not any(True for _ in context.events("scaler-update")):
                edit.put_after(step.stmt, f"{before.local}.update()")
            message = f"{step.local}.step() uses scaled gradients: {fixed} takes the scale out first"
            yield hit("SS204", step.node, message, diff=edit.diff())
