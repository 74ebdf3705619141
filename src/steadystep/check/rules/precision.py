"""The type of mixed precision: SS201 a scaler for bf16, SS202 fp16 without one."""

import ast
import re
from collections.abc import Iterator

from steadystep.check.context import Context, Cycle, hit
from steadystep.check.events import meets
from steadystep.check.hit import Hit
from steadystep.check.names import argument, last, name_of, path_of
from steadystep.check.rules.accumulation import rescales_gradients
from steadystep.check.script import Script

_FP16 = ("torch.float16", "torch.half")
_BF16 = ("torch.bfloat16",)
_SCALES = re.compile(r"scaler|(loss|grad)_?scal|scale_?(loss|grad)", re.I)
_OF_FEATURES = ("StandardScaler", "MinMaxScaler", "RobustScaler", "MaxAbsScaler")


def check(context: Context) -> Iterator[Hit]:
    """Both."""
    script = context.script
    casts = [c for c in script.calls.get("autocast", ()) if _is_autocast(context, c)]
    casts += [c for c in script.calls.get("partial", ()) if c.args and "autocast" in script.full(c.args[0])]
    yield from _scaler_for_bf16(context, casts)
    yield from _fp16_bare(context, casts)
    yield from _in_forward(context, casts)
    yield from _by_a_name(context, casts)
    yield from _whole_in_fp16(context)


def _is_autocast(context: Context, call: ast.Call) -> bool:
    return "autocast" in context.script.full(call.func) and not context.script.full(call.func).startswith("self.")


def _dtype(context: Context, call: ast.Call) -> str:
    """`fp16`, `bf16`, or empty when the file does not say."""
    script, full = context.script, context.script.full(call.func)
    given = next((k.value for k in call.keywords if k.arg == "dtype"), None)
    old = ".cuda.amp." in full
    if last(full) == "partial" and given is None:
        return ""
    if given is None and len(call.args) > 1 and not old and not isinstance(call.args[1], ast.Constant):
        given = call.args[1]
    if given is not None:
        names = {script.full(given)}
        if path_of(given) and not script.full(given).startswith("torch."):
            names = {script.full(v) for v in script.values(path_of(given), call)}
        if names and names <= set(_FP16):
            return "fp16"
        return "bf16" if names and names <= set(_BF16) else ""
    if old:
        return "fp16"
    device = argument(call, 0, "device_type")
    return "fp16" if isinstance(device, ast.Constant) and str(device.value).startswith("cuda") else ""


def _always_on(call: ast.Call) -> bool:
    enabled = next((k.value for k in call.keywords if k.arg == "enabled"), None)
    return enabled is None or (isinstance(enabled, ast.Constant) and enabled.value is True)


def _may_be_on(context: Context, call: ast.Call) -> bool:
    """On, or switched by something that the file does not set to False."""
    enabled = next((k.value for k in call.keywords if k.arg == "enabled"), None)
    if enabled is None or isinstance(enabled, ast.Constant):
        return _always_on(call)
    values = context.script.values(path_of(enabled), call)
    return not isinstance(enabled, ast.Compare) and not any(getattr(v, "value", None) is False for v in values)


def _scaler_for_bf16(context: Context, casts: list[ast.Call]) -> Iterator[Hit]:
    flags = {ast.dump(k.value) for c in casts for k in c.keywords if k.arg == "enabled"}
    made = [
        c
        for c in context.script.calls.get("GradScaler", ())
        if _always_on(c) or {ast.dump(k.value) for k in c.keywords if k.arg == "enabled"} == flags
    ]
    whole = not casts and bool(cast_networks(context, _BF16, "bfloat16"))
    if not made or not (casts or whole) or any(_dtype(context, cast) != "bf16" for cast in casts):
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
            if _dtype(context, call) != "fp16" or not _may_be_on(context, call):
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
        around = scope if scope is not None else script.parents.get(cast)
        inside = (
            isinstance(around, ast.FunctionDef) and around.name == "forward" and script.class_of(around) is not None
        )
        if inside and _dtype(context, cast) == "fp16" and _may_be_on(context, cast):
            yield hit("SS202", cast, "fp16 autocast without a GradScaler", snippet=_SCALED)


def _by_a_name(context: Context, casts: list[ast.Call]) -> Iterator[Hit]:
    """`ctx = torch.autocast(...)` once, and `with ctx:` in the loop that trains."""
    script = context.script
    if not casts or _is_scaled(context):
        return
    loops = {c.loop.node for c in context.cycles if c.loop is not None and _plainly_trains(c)}
    for cast in casts:
        stmt = script.parents.get(cast)
        name = name_of(stmt.targets[0]) if isinstance(stmt, ast.Assign) else ""
        withs = [
            n for n in script.nodes if isinstance(n, ast.With) and name in {name_of(i.context_expr) for i in n.items}
        ]
        used = name and any(loops & set(script.loops_of(w)) for w in withs)
        if used and len(script.named.get(name, ())) == 1 and _dtype(context, cast) == "fp16" and _always_on(cast):
            yield hit("SS202", cast, "fp16 autocast without a GradScaler", snippet=_SCALED)


def _plainly_trains(cycle: Cycle) -> bool:
    return cycle.step.kind == "step" and bool(cycle.of("backward")) and not any(e.managed for e in cycle.events)


def _whole_in_fp16(context: Context) -> Iterator[Hit]:
    """`model.half()` before training, and a plain backward and step."""
    if _is_scaled(context) or context.mentions("autocast"):
        return
    for call in cast_networks(context, _FP16, "half"):
        if any(_plainly_trains(c) for c in context.cycles):
            yield hit("SS202", call, "the network is trained in fp16 without a GradScaler", snippet=_SCALED)
            return


def cast_networks(context: Context, types: tuple[str, ...], method: str) -> list[ast.Call]:
    """Calls that cast a network which an optimizer of the file holds, made before its training begins."""
    script = context.script
    made = [c for calls in script.calls.values() for c in calls if context.roles.is_optimizer(c)]
    trained = {context.roles.model_of(c): c for c in made} if len(made) == 1 else {}
    found = []
    for name in ("to", method):
        for call in script.calls.get(name, ()):
            to_type = name == method or any(
                script.full(a) in types for a in (*call.args, *(k.value for k in call.keywords))
            )
            stmt = script.stmt_of(call)
            owner = name_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
            target = name_of(stmt.targets[0]) if isinstance(stmt, ast.Assign) else owner
            optimizer = trained.get(target)
            if not to_type or optimizer is None or script.scope_of(call) is not script.scope_of(optimizer):
                continue
            if stmt.lineno < optimizer.lineno and not script.loops_of(call) and not _conditional(script, call):
                found.append(call)
    return found


def _conditional(script: Script, call: ast.Call) -> bool:
    return any(isinstance(a, ast.If | ast.IfExp) for a in script.ancestors(call))


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
