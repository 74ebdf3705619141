"""Steps with a scaler: SS203 no update, SS204 a step past it."""

from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.events import meets
from steadystep.lint.hit import Hit
from steadystep.lint.names import last, name_of


def check(context: Context) -> Iterator[Hit]:
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
