"""SS107 with two losses: the gradients of the first are cleared before anything has used them."""

import ast
from collections.abc import Iterator

from steadystep.lint.context import Context, Cycle, hit
from steadystep.lint.events import Event, implied
from steadystep.lint.hit import Hit
from steadystep.lint.rules.stepping import clears


def check(context: Context) -> Iterator[Hit]:
    """For every step in every loop."""
    for cycle in context.cycles:
        # why: something outside the file that takes the optimizer may use them
        if not any(e.kind in ("opaque", "guard") for e in cycle.events):
            yield from _wiped_unused(context, cycle)


def _wiped_unused(context: Context, cycle: Cycle) -> Iterator[Hit]:
    """A backward whose gradients are cleared for every optimizer of the pass before any of them steps."""
    steps = cycle.of("step", "scaler-step")
    if cycle.step is not steps[0] or len({e.inner for e in (*steps, *cycle.of("backward"))}) != 1:
        return
    if "grad" in context.script.attributes or cycle.of("grad-call"):
        return
    for first in cycle.of("backward"):
        rest = cycle.after(first)
        end = next((i for i, e in enumerate(rest) if e.kind in ("step", "scaler-step")), len(rest))
        again = next((i for i, e in enumerate(rest) if e.kind == "backward"), len(rest))
        wiping = [e for e in rest[: min(end, again)] if e.kind == "zero" and implied(e, first)]
        if again < end and _measures_first(context, first, rest[again]):
            continue
        if again < end and wiping and all(any(clears(context, z, s) for z in wiping) for s in steps):
            message = (
                f"the gradients of {ast.unparse(first.loss) if first.loss else 'a loss'} are cleared before any step"
            )
            yield hit(
                "SS107", wiping[0].node, message, snippet="optimizer.zero_grad()   # before the first backward only"
            )
            return


def _measures_first(context: Context, first: Event, second: Event) -> bool:
    """The graph is kept, and the loss of the second backward is put together after the first: that one measured."""
    given = first.node.keywords if isinstance(first.node, ast.Call) else []
    kept = any(k.arg == "retain_graph" and getattr(k.value, "value", True) for k in given)
    if not kept or not isinstance(second.loss, ast.Name):
        return kept
    made = context.script.reaching(second.loss.id, second.node)
    return made is not None and made[0].lineno > first.line
