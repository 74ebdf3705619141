"""Where the clip stands: SS101 before the unscaling, SS102 after the step, SS103 before backward, SS603 elsewhere."""

import ast
from collections.abc import Iterator

from steadystep.lint.context import Context, Cycle, can_move, hit, source_of
from steadystep.lint.events import Event, implied, meets
from steadystep.lint.networks import Network, network_identity, related
from steadystep.lint.report import Hit


def check(context: Context) -> Iterator[Hit]:
    """All four, for every clip in every loop."""
    for cycle in context.cycles:
        for clip in cycle.of("clip"):
            if not meets(clip, cycle.step) or clip.no_grad:
                continue
            yield from _before_unscale(context, cycle, clip)
            yield from _after_step(context, cycle, clip)
            yield from _before_backward(context, cycle, clip)
            yield from _wrong_network(context, cycle, clip)


def _before_unscale(context: Context, cycle: Cycle, clip: Event) -> Iterator[Hit]:
    if clip.managed or cycle.step.kind != "scaler-step":
        return
    for event in cycle.before(clip):
        if not meets(event, clip) or not meets(event, cycle.step):
            continue
        if event.kind == "unscale" or event.kind in ("step", "scaler-step"):
            return
        if event.kind == "backward":
            if event.scaled and event.owner == cycle.step.owner:
                yield _unscale_first(context, cycle, clip)
            return


def _unscale_first(context: Context, cycle: Cycle, clip: Event) -> Hit:
    scaler, optimizer = _written(cycle.step)
    edit = context.edit().put_before(clip.stmt, f"{scaler}.unscale_({optimizer})")
    late = next((e for e in cycle.after(clip) if e.kind == "unscale" and e.owner == cycle.step.owner), None)
    if late is not None:
        edit.remove(late.stmt)
    message = f"gradients are clipped while they are still scaled: call {scaler}.unscale_({optimizer}) first"
    same_place = _same_function(context, clip, cycle.step)
    return hit("SS101", clip.node, message, diff=edit.diff() if same_place else "", snippet=_ORDER)


def _written(step: Event) -> tuple[str, str]:
    call = step.node
    assert isinstance(call, ast.Call)
    return step.local, ast.unparse(call.args[0]) if call.args else "optimizer"


def _after_step(context: Context, cycle: Cycle, clip: Event) -> Iterator[Hit]:
    for later in cycle.after(clip):
        if later.kind == "backward":
            break
        if later.kind in ("step", "scaler-step", "opaque") and meets(later, clip):
            return
    for event in cycle.before(clip):
        if event.kind == "backward" and meets(event, clip):
            return
        if event.kind in ("step", "scaler-step") and implied(event, clip):
            diff = ""
            if can_move(clip.stmt, event.stmt, context.script):
                moved = source_of(clip.stmt, context.script)
                diff = context.edit().remove(clip.stmt).put_before(event.stmt, *moved).diff()
            yield hit("SS102", clip.node, "gradients are clipped after the update was made", diff=diff, snippet=_ORDER)
            return


def _before_backward(context: Context, cycle: Cycle, clip: Event) -> Iterator[Hit]:
    for event in cycle.before(clip):
        if event.kind in ("backward", "opaque") and meets(event, clip):
            return
        if event.kind in ("step", "scaler-step") and meets(event, clip):
            break
    for event in cycle.after(clip):
        if event.kind in ("step", "scaler-step", "opaque") and meets(event, clip):
            return
        if event.kind == "backward" and meets(event, clip) and event.inner == clip.inner:
            diff = ""
            if can_move(clip.stmt, event.stmt, context.script):
                moved = source_of(clip.stmt, context.script)
                diff = context.edit().remove(clip.stmt).put_after(event.stmt, *moved).diff()
            message = "gradients are clipped before backward() has computed them"
            yield hit("SS103", clip.node, message, diff=diff, snippet=_ORDER)
            return


def _wrong_network(context: Context, cycle: Cycle, clip: Event) -> Iterator[Hit]:
    """Only where both networks have an optimizer of their own, so that they are known to be two."""
    if cycle.step is next(iter(_steps_after(cycle, clip)), None) and (told := _by_identity(context, cycle, clip)):
        yield told
        return
    clipped = clip.subject
    owned = {_model(context, e) for e in cycle.root if e.kind in ("step", "scaler-step")} - {""}
    if not clipped or clipped not in owned or cycle.step is not next(iter(_steps_after(cycle, clip)), None):
        return
    stepped = {_model(context, event) for event in _steps_after(cycle, clip)}
    if "" in stepped or clipped in stepped:
        return
    other = sorted(stepped)[0]
    assert isinstance(clip.node, ast.Call)
    target = clip.node.args[0] if clip.node.args else clip.node
    diff = context.edit().replace(target, f"{other}.parameters()").diff()
    yield hit("SS603", clip.node, f"{clipped} is clipped, but the step that follows updates {other}", diff=diff)


def _by_identity(context: Context, cycle: Cycle, clip: Event) -> Hit | None:
    """The same by what the networks were made from, where the clip or the step is behind a helper."""
    script = context.script
    clipped = Network(clip.subject, clip.top or script.tree)
    made = network_identity(script, clipped) if clip.subject else frozenset()
    held = [context.stepped(e) for e in _steps_after(cycle, clip)]
    everyone = [context.stepped(e) for e in cycle.root if e.kind in ("step", "scaler-step")]
    if not made or not held or any(networks is None for networks in (*held, *everyone)):
        return None
    if not any(made == network_identity(script, n) for networks in everyone for n in networks or ()):
        return None
    stepped = [n for networks in held for n in networks or ()]
    if any(related(script, clipped, n) is not False for n in stepped):
        return None
    message = f"{clip.subject} is clipped, but the step that follows updates {stepped[0].path}"
    diff = ""
    assert isinstance(clip.node, ast.Call)
    if script.scope_of(clip.node) is script.scope_of(cycle.step.node) and clip.node.args:
        diff = context.edit().replace(clip.node.args[0], f"{stepped[0].path}.parameters()").diff()
    return hit("SS603", clip.node, message, diff=diff, snippet=f"clip_grad_norm_({stepped[0].path}.parameters(), 1.0)")


def _steps_after(cycle: Cycle, clip: Event) -> Iterator[Event]:
    for event in cycle.after(clip):
        if event.kind == "backward":
            return
        if event.kind in ("step", "scaler-step") and meets(event, clip):
            yield event


def _model(context: Context, step: Event) -> str:
    name = step.local if step.kind == "step" else _written(step)[1]
    made = context.roles.optimizer_call(name, step.node)
    return context.roles.model_of(made) if made is not None else ""


def _same_function(context: Context, a: Event, b: Event) -> bool:
    return context.script.scope_of(a.node) is context.script.scope_of(b.node)


_ORDER = """scaler.scale(loss).backward()   # without a scaler: loss.backward()
scaler.unscale_(optimizer)
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)          # without a scaler: optimizer.step()
scaler.update()
optimizer.zero_grad()"""
