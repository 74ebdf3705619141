"""Passes over data without training: loops and comprehensions that run a network, and what they go over."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from steadystep.lint.bindings import parameters, passed
from steadystep.lint.context import Context
from steadystep.lint.modules import is_model_call
from steadystep.lint.names import calls_in, last, name_of
from steadystep.lint.script import Scope, Script
from steadystep.lint.targets import target_of

HELD_OUT = re.compile(
    r"(^|_)(val|valid|validation|eval|test|dev|holdout|heldout)(_|$|\d|dl|loader|set|data|iter)", re.I
)
TRAIN = re.compile(r"(^|_)train(ing)?(_|$|dl|loader|set|data)", re.I)
_TRAINS = re.compile(r"^_?(train|learn|fit|optimi[sz]e|backprop)(_|$)|^_?(g|d|gen|disc|opt|optim)_step$", re.I)
_GOES_BACK = ("backward", "manual_backward")
_DEEPEST = 3

Loop = ast.For | ast.AsyncFor


@final
@dataclass(frozen=True, slots=True)
class Pass:
    """One loop or comprehension with networks in it."""

    node: ast.AST
    stmt: ast.stmt
    scope: Scope
    over: frozenset[str]
    """Names of what it goes over, by the callers' names too."""
    forwards: tuple[ast.Call, ...]


def passes(context: Context) -> Iterator[Pass]:
    """Every one that does not train."""
    script = context.script
    for node in script.nodes:
        if isinstance(node, ast.For | ast.AsyncFor):
            over, calls = node.iter, [c for s in node.body for c in calls_in(s)]
        elif isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp):
            parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            over, calls = node.generators[0].iter, [c for part in parts for c in calls_in(part)]
        else:
            continue
        forwards = tuple(c for c in calls if is_model_call(c, script) or leads_to_one(c, script))
        if forwards and not trains(context, node) and len(script.loops_of(node)) <= 2:
            scope = script.scope_of(node)
            yield Pass(node, script.stmt_of(node), scope, frozenset(_over(script, over, scope)), forwards)


def steps_in(context: Context, node: ast.AST) -> bool:
    """Whether a step or a backward stands in it."""
    inside = set(ast.walk(node))
    steps = context.events("backward", "step", "scaler-step", "guard", "opaque")
    return any(e.node in inside for e in steps if e.kind != "opaque" or e.owner)


def trains(context: Context, node: ast.AST) -> bool:
    """Whether a step or a backward is in it, or may be in what it calls."""
    inside = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
    return steps_in(context, node) or any(_may_train(call, context.script) for call in inside)


def _may_train(call: ast.Call, script: Script, depth: int = 0) -> bool:
    """A call into this file that goes back somewhere below, or one out of it that is named like that."""
    function = target_of(call, script)
    if function is None:
        leaf = call.func.attr if isinstance(call.func, ast.Attribute) else name_of(call.func)
        return bool(_TRAINS.search(leaf)) and not (leaf == "train" and isinstance(call.func, ast.Attribute))
    calls = [c for stmt in function.body for c in calls_in(stmt)]
    if any(isinstance(c.func, ast.Attribute) and c.func.attr in _GOES_BACK for c in calls):
        return True
    return depth < _DEEPEST and any(_may_train(c, script, depth + 1) for c in calls)


def leads_to_one(call: ast.Call, script: Script, depth: int = 0) -> bool:
    """A call into this file that runs a network, perhaps through others, and does nothing else of interest."""
    function = target_of(call, script) if depth < _DEEPEST else None
    if function is None:
        return False
    calls = [c for stmt in function.body for c in calls_in(stmt)]
    busy = any(
        isinstance(c.func, ast.Attribute) and c.func.attr in ("backward", "eval", "train", "step") for c in calls
    )
    return not busy and any(is_model_call(c, script) or leads_to_one(c, script, depth + 1) for c in calls)


def names_in(node: ast.AST) -> set[str]:
    """Last parts of names, and texts."""
    found = {last(name_of(n)) for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute)}
    return found | {str(n.value) for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def _over(script: Script, node: ast.expr, scope: Scope) -> set[str]:
    found = names_in(node)
    if scope is None or any(HELD_OUT.search(n) or TRAIN.search(n) for n in found):
        return found
    given = [words for name in sorted(found) if name in parameters(scope) for words in _given(script, scope, name)]
    # why all: a function that is called with both kinds of data is about neither
    held_out = [words for words in given if any(HELD_OUT.search(n) for n in words)]
    return found.union(*given) if given and len(held_out) == len(given) else found


def _given(script: Script, function: Scope, name: str) -> list[set[str]]:
    """The names of what each caller gives."""
    if function is None:
        return []
    names = parameters(function)
    position = names.index(name) - (1 if names[:1] in (["self"], ["cls"]) else 0)
    sites = [c for c in script.calls.get(function.name, ()) if script.scope_of(c) is not function]
    values = [passed(c, position, name) for c in sites]
    return [names_in(v) if v is not None else set() for v in values]
