"""Which fixes `check --fix` may apply: those of some rules, and of these only edits that are local and unambiguous.

A safe fix stays in one block and adds or moves one statement next to the calls it belongs to, or changes no value. The
others change a training recipe, or there is more than one way to repair the fault: they are shown and left to the user.
"""

import ast
import re
from collections.abc import Callable
from typing import Literal

from steadystep.lint.patch import Replacement, apply, replacements
from steadystep.lint.report import Hit
from steadystep.lint.span import Span, calls, calls_method, may_pass, moved, span_of

FixState = Literal["safe", "unsafe", "none"]
_NOT_LOCAL = "it would change more than one place"
_PASSES = "statements in between use the same names, or leave the block"

UNSAFE: dict[str, str] = {
    "SS105": "the length of the schedule may have to change with it",
    "SS108": "there is more than one way to repair it",
    "SS109": "it changes the effective learning rate",
    "SS110": "a backward in another file may need the graph",
    "SS201": "it changes how the run is scaled",
    "SS301": "the loss may have been detached deliberately",
    "SS303": "it changes the outputs of the model",
    "SS304": "it changes the outputs of the model",
    "SS305": "it changes the outputs of the model",
    "SS306": "it changes how far back gradients reach",
    "SS401": "the mode of the model may be set elsewhere",
    "SS403": "the model may be kept in eval mode deliberately",
    "SS503": "it changes a setting",
    "SS504": "it changes a setting",
    "SS505": "it changes a setting",
    "SS601": "it changes which parameters are trained",
    "SS603": "it changes which parameters are clipped",
    "SS604": "it changes which parameters are trained",
}
"""Why the fix of a rule is not applied. A rule that is in neither table is not applied either."""


def edits(hit: Hit) -> tuple[Replacement, ...]:
    """Return the lines that a fix replaces.

    A running total gets `.detach()` instead of `.item()`: it stays a tensor for whatever reads it later.
    """
    found = replacements(hit.diff)
    if hit.code != "SS302":
        return found
    return tuple(
        Replacement(
            first=f.first, old=f.old, new=tuple(map(_detached, f.old, f.new)) if len(f.old) == len(f.new) else f.new
        )
        for f in found
    )


def _detached(old: str, new: str) -> str:
    """`loss` -> `loss.item()` as `loss.detach()`, where that is all that changed."""
    for found in re.finditer(r"\.item\(\)", new):
        if new[: found.start()] + new[found.end() :] == old:
            return f"{new[: found.start()]}.detach(){new[found.end() :]}"
    return new


def fix_state(hit: Hit, text: str) -> FixState:
    """Return whether a hit has a fix, and whether `--fix` would apply it."""
    if not hit.diff:
        return "none"
    return "unsafe" if why_unsafe(hit, text) else "safe"


def why_unsafe(hit: Hit, text: str) -> str:
    """Return why the fix of a hit is not applied to this text; empty where it is safe."""
    gate = _GATES.get(hit.code)
    if gate is None:
        return UNSAFE.get(hit.code, "it needs a decision")
    fixed = apply(text, edits(hit))
    if fixed is None:
        return "it does not fit the file"
    try:
        span = span_of(ast.parse(text).body, ast.parse(fixed).body)
    except (SyntaxError, ValueError, RecursionError):
        return "the result would not be valid Python"
    return gate(span, text)


def _move(span: Span, text: str) -> str:
    found = moved(span)
    if found is None:
        return _NOT_LOCAL
    return "" if may_pass(*found) else _PASSES


def _unscale(span: Span, text: str) -> str:
    """`scaler.unscale_(optimizer)` in front of the clip, or moved there, and the step after it in the same block."""
    found = moved(span)
    if span.added is None and found is None:
        return _NOT_LOCAL
    new = span.new[0]
    following = (*span.new[1:], *span.after)
    call = next(calls(new), None)
    if call is None or not isinstance(call.func, ast.Attribute) or not call.args or not following:
        return _NOT_LOCAL
    scaler, optimizer = ast.unparse(call.func.value), ast.unparse(call.args[0])
    if not any("clip" in ast.unparse(c.func) for c in calls(following[0])):
        return _NOT_LOCAL
    if not any(calls_method(stmt, scaler, "step", optimizer) for stmt in following):
        return f"{scaler}.step({optimizer}) is not in the same block"
    written = ast.unparse(call)
    again = any(written in ast.unparse(stmt) for stmt in (*span.before, *following))
    return f"{written} is called elsewhere in the block" if again else ""


def _zero(span: Span, text: str) -> str:
    """`optimizer.zero_grad()` in front of the only backward before the step, all in one block."""
    call = next(calls(span.added), None) if span.added is not None else None
    if call is None or not isinstance(call.func, ast.Attribute) or not span.after:
        return _NOT_LOCAL
    optimizer = ast.unparse(call.func.value)
    if not any(_goes_back(c) for c in calls(span.after[0])):
        return _NOT_LOCAL
    for stmt in reversed(span.before):
        words = {n.attr for n in ast.walk(stmt) if isinstance(n, ast.Attribute)}
        if any("backward" in word for word in words):
            return "an earlier backward adds to the same gradients"
        if "step" in words:
            break
    stepped = [
        stmt
        for stmt in span.after
        if calls_method(stmt, optimizer, "step") or any(_gives(c, "step", optimizer) for c in calls(stmt))
    ]
    return "" if stepped else f"{optimizer}.step() is not in the same block"


def _goes_back(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and "backward" in call.func.attr


def _gives(call: ast.Call, method: str, argument: str) -> bool:
    named = isinstance(call.func, ast.Attribute) and call.func.attr == method
    return named and bool(call.args) and ast.unparse(call.args[0]) == argument


def _update(span: Span, text: str) -> str:
    """`scaler.update()` after the only step of that scaler."""
    call = next(calls(span.added), None) if span.added is not None else None
    if call is None or not isinstance(call.func, ast.Attribute) or not span.before:
        return _NOT_LOCAL
    scaler = ast.unparse(call.func.value)
    if not calls_method(span.before[-1], scaler, "step"):
        return _NOT_LOCAL
    steps = [
        n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and ast.unparse(n.func) == f"{scaler}.step"
    ]
    return "" if len(steps) == 1 else f"{scaler}.step() is called more than once"


def _through_scaler(span: Span, text: str) -> str:
    """`scaler.step(optimizer)` for `optimizer.step()`, with `scaler.update()` if the script has none."""
    if len(span.old) != 1 or len(span.new) not in (1, 2) or not isinstance(span.old[0], ast.Expr):
        return _NOT_LOCAL
    if re.search(r"\bget_scale\b|\.grad\b", text):
        return "the script may take the scale out by hand"
    every = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    steps = [n for n in every if ast.unparse(n.func).endswith(".step") and "sched" not in ast.unparse(n.func).lower()]
    return "" if len(steps) == 1 else "another step may share the scaler"


def _detach(span: Span, text: str) -> str:
    """Nothing but `.detach()` behind an expression of one statement."""
    if len(span.old) != 1 or len(span.new) != 1:
        return _NOT_LOCAL
    old, new = ast.dump(span.old[0]), ast.dump(span.new[0])
    for call in (n for n in ast.walk(span.new[0]) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)):
        assert isinstance(call.func, ast.Attribute)
        inner = ast.dump(call.func.value)
        if call.func.attr == "detach" and new.replace(ast.dump(call), inner, 1) == old:
            return ""
    return "the total may be used as a tensor later"


def _no_grad(span: Span, text: str) -> str:
    """The loop as it is, inside `with torch.no_grad():`."""
    if len(span.old) != 1 or len(span.new) != 1 or not isinstance(span.new[0], ast.With):
        return _NOT_LOCAL
    if list(map(ast.dump, span.new[0].body)) != [ast.dump(span.old[0])]:
        return "a text over several lines would be indented with it"
    imports = [a for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import) for a in n.names]
    known = any(a.name.partition(".")[0] == "torch" and a.asname in (None, "torch") for a in imports)
    return "" if known else "torch is not imported under that name"


def _after_move(span: Span, text: str) -> str:
    """The optimizer below the line that moves the model."""
    found = moved(span)
    if found is None:
        return _NOT_LOCAL
    return "" if may_pass(*found, but=found[1][-1]) else _PASSES


_GATES: dict[str, Callable[[Span, str], str]] = {
    "SS101": _unscale,
    "SS102": _move,
    "SS103": _move,
    "SS104": _move,
    "SS106": _zero,
    "SS107": _move,
    "SS203": _update,
    "SS204": _through_scaler,
    "SS302": _detach,
    "SS402": _no_grad,
    "SS602": _after_move,
}
SAFE = frozenset(_GATES)
"""The rules whose fixes can be safe."""
