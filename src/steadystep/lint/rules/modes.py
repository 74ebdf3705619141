"""SS403: eval() in a loop that trains, and never back."""

from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.events import Event, Loop
from steadystep.lint.hit import Hit
from steadystep.lint.names import last
from steadystep.lint.rules.evaluation_mode import may_switch


def check(context: Context) -> Iterator[Hit]:
    """eval() in the loop that also trains, and no train() in it."""
    trained = {last(e.owner) for e in context.events("train", "mode")}
    for root in context.roots:
        for event in root:
            if event.kind == "eval" and event.loops and not event.last_round:
                yield from _not_back(context, root, event, trained)


def _not_back(context: Context, root: tuple[Event, ...], event: Event, trained: set[str]) -> Iterator[Hit]:
    loop = next((around for around in reversed(event.loops) if _steps_in(root, around)), None)
    if loop is None or any(e.kind in ("train", "mode") and loop in e.loops for e in root):
        return
    step = _steps_in(root, loop)[0]
    made = context.roles.optimizer_call(step.local if step.kind == "step" else step.subject, step.node)
    model = context.roles.model_of(made) if made is not None else ""
    if last(event.owner) not in trained and last(event.owner) != last(model):
        return
    if any(e.kind in ("guard", "opaque") and loop in e.loops for e in root) or may_switch(context.script, loop.node):
        return
    diff = ""
    first = loop.body[0] if loop.body else event.stmt
    if loop.body and context.script.scope_of(event.node) is context.script.scope_of(first):
        diff = context.edit().put_before(first, f"{event.local}.train()").diff()
    snippet = f"{event.local}.train()   # at the start of each epoch, or right after the evaluation"
    yield hit("SS403", event.node, f"{event.owner}.train() is not called again after this", diff=diff, snippet=snippet)


def _steps_in(root: tuple[Event, ...], loop: Loop) -> list[Event]:
    return [e for e in root if e.kind in ("step", "scaler-step") and loop in e.loops]
