"""The order around a step: SS104 and SS105 the schedule, SS107 zero_grad."""

import ast
from collections.abc import Iterator

from steadystep.lint.context import Context, Cycle, can_move, hit, source_of
from steadystep.lint.events import Event, implied, meets
from steadystep.lint.names import name_of
from steadystep.lint.numbers import number_at
from steadystep.lint.report import Hit
from steadystep.lint.rules.accumulation import counting
from steadystep.lint.rules.zeroing import optimizer_written

_ACCUMULATION = "gradient_accumulation_steps"


def check(context: Context) -> Iterator[Hit]:
    """All three, for every step in every loop."""
    for cycle in context.cycles:
        yield from _schedule_first(context, cycle)
        if cycle.leaves_the_file:
            continue  # something outside the file takes the optimizer: it may do all of this
        yield from _schedule_on_skips(context, cycle)
        yield from _schedule_not_prepared(context, cycle)
        yield from _zero_too_early(context, cycle)


def _schedule_first(context: Context, cycle: Cycle) -> Iterator[Hit]:
    step = cycle.step
    for schedule in [e for e in cycle.root if e.kind == "schedule"]:
        loop = schedule.inner
        if loop is None or loop not in step.loops or _arguments(schedule) or not implied(schedule, step):
            continue
        if _on_purpose(context, schedule) or _skips(context, schedule, step):
            continue  # with steps that are left out it is SS105
        inside = [e for e in cycle.root if loop in e.loops]
        if any(e.kind in ("step", "scaler-step", "opaque") for e in inside[: inside.index(schedule)]):
            continue
        if inside.index(schedule) > inside.index(step):
            continue
        diff = ""
        if can_move(schedule.stmt, step.stmt, context.script):
            moved = source_of(schedule.stmt, context.script)
            diff = context.edit().remove(schedule.stmt).put_after(step.stmt, *moved).diff()
        message = f"{schedule.local}.step() comes before {step_name(step)}"
        yield hit("SS104", schedule.node, message, diff=diff, snippet=f"{step_name(step)}\n{schedule.local}.step()")


def _on_purpose(context: Context, schedule: Event) -> bool:
    """Torch warns of it, and the warning is switched off right there."""
    around = [a for a in context.script.ancestors(schedule.node) if isinstance(a, ast.With)]
    return any("catch_warnings" in ast.unparse(item.context_expr) for w in around for item in w.items)


def _schedule_on_skips(context: Context, cycle: Cycle) -> Iterator[Hit]:
    step = cycle.step
    backward = next((e for e in cycle.before(step) if e.kind == "backward" and meets(e, step)), None)
    if backward is None or backward.managed:
        return
    for schedule in (e for e in cycle.events if e.kind == "schedule" and e.inner == step.inner):
        if any(
            (question, 1 - arm) in schedule.branch and counting(context, question, arm) for question, arm in step.branch
        ):
            message = f"{schedule.local}.step() counts iterations in which {step_name(step)} is not called"
            yield hit("SS105", schedule.node, message, snippet=f"{step_name(step)}\n{schedule.local}.step()")
            return
    early = [e for e in cycle.before(step) if _skips(context, e, step)]
    for schedule in [*early, *cycle.after(step)]:
        if schedule.kind != "schedule" or schedule.inner != step.inner or _arguments(schedule):
            continue
        extra = set(step.branch) - set(schedule.branch)
        if not _nearly_implied(context, schedule, step) or not extra or not implied(backward, schedule):
            continue
        if any(_elsewhere(other, step, schedule) for other in cycle.of("step", "scaler-step")):
            continue
        diff = ""
        if not ({";"} & set(context.script.lines[schedule.line - 1])):
            moved = source_of(schedule.stmt, context.script)
            diff = context.edit().remove(schedule.stmt).put_after(step.stmt, *moved).diff()
        message = f"{schedule.local}.step() also counts iterations in which {step_name(step)} is not called"
        yield hit("SS105", schedule.node, message, diff=diff)


def _skips(context: Context, schedule: Event, step: Event) -> bool:
    """The step is made once in so many batches, and the schedule is not."""
    extra = set(step.branch) - set(schedule.branch)
    return schedule.inner == step.inner and any(counting(context, *arm) is not None for arm in extra)


def _schedule_not_prepared(context: Context, cycle: Cycle) -> Iterator[Hit]:
    """With accelerate the optimizer skips the steps inside of a group; a schedule does so if it was prepared too."""
    script, step = context.script, cycle.step
    made = [c for c in script.calls.get("Accelerator", ()) if any(k.arg == _ACCUMULATION for k in c.keywords)]
    groups = [number_at(k.value, script, c) for c in made for k in c.keywords if k.arg == _ACCUMULATION]
    if not groups or any(many is None or many <= 1 for many in groups) or "accumulate" not in script.calls:
        return
    prepared = {name_of(a) for c in script.calls.get("prepare", ()) for a in c.args}
    given = [a for c in script.calls.get("prepare", ()) for a in c.args]
    if any(isinstance(a, ast.Starred) for a in given) or "prepare_scheduler" in script.calls:
        return
    for schedule in cycle.after(step):
        if schedule.kind != "schedule" or schedule.inner != step.inner or _arguments(schedule):
            continue
        asked = [ast.unparse(context.asked[n]) for n, _ in schedule.branch if n in context.asked]
        values = script.values(schedule.local, schedule.node)
        if not values or any(context.roles.made_by(v) != "scheduler" for v in values):
            continue
        if schedule.local in prepared or any("sync" in a or "%" in a or "skipped" in a for a in asked):
            continue
        message = f"{schedule.local} was not prepared, so it also counts iterations in which accelerate makes no update"
        snippet = f"{schedule.local} = accelerator.prepare({schedule.local})   # or: if accelerator.sync_gradients: ..."
        yield hit("SS105", schedule.node, message, snippet=snippet)


def _nearly_implied(context: Context, schedule: Event, step: Event) -> bool:
    """On every pass with a step, but for the last ones: `if scheduler.last_epoch < total: scheduler.step()`."""
    for question, arm in set(schedule.branch) - set(step.branch):
        asked = context.asked.get(question)
        below = isinstance(asked, ast.Compare) and isinstance(asked.ops[0], ast.Lt | ast.LtE) and arm == 0
        words = {n.attr for n in ast.walk(asked) if isinstance(n, ast.Attribute)} if asked is not None else set()
        there = isinstance(asked, ast.Compare) and isinstance(asked.ops[0], ast.IsNot) and arm == 0
        if not (below and words & {"last_epoch", "_step_count", "total_steps"}) and not there:
            return False
    return True


def _elsewhere(other: Event, step: Event, schedule: Event) -> bool:
    """A step in another arm: then the schedule does follow a step."""
    return other is not step and not meets(other, step) and implied(schedule, other)


def _zero_too_early(context: Context, cycle: Cycle) -> Iterator[Hit]:
    step = cycle.step
    wiped: Event | None = None
    for event in cycle.before(step):
        if not meets(event, step):
            continue
        if event.kind in ("step", "scaler-step", "grad-call"):
            return
        if event.kind == "zero" and wiped is None and implied(event, step) and clears(context, event, step):
            wiped = event
        if event.kind == "backward":
            if wiped is not None and implied(event, wiped):
                diff = ""
                if can_move(wiped.stmt, step.stmt, context.script):
                    moved = source_of(wiped.stmt, context.script)
                    diff = context.edit().remove(wiped.stmt).put_after(step.stmt, *moved).diff()
                message = f"{wiped.local or 'the gradient'} is cleared between backward() and {step_name(step)}"
                yield hit("SS107", wiped.node, message, diff=diff)
            return


def clears(context: Context, zero: Event, step: Event) -> bool:
    """Whether a zero_grad is about the parameters of that step."""
    optimizer = step.subject if step.kind == "scaler-step" else step.owner
    if zero.owner == optimizer:
        return True
    made = context.roles.optimizer_call(optimizer_written(step), step.node)
    return made is not None and bool(zero.local) and context.roles.model_of(made) == zero.local


def _arguments(schedule: Event) -> bool:
    return isinstance(schedule.node, ast.Call) and bool(schedule.node.args or schedule.node.keywords)


def step_name(step: Event) -> str:
    """`optimizer.step()` as it is written."""
    return f"{step.local}.step({'' if step.kind == 'step' else optimizer_written(step)})"


def check_wiped(context: Context) -> Iterator[Hit]:
    """For every step in every loop."""
    for cycle in context.cycles:
        # why: something outside the file that takes the optimizer may use them
        if not cycle.leaves_the_file:
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
