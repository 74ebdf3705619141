"""Questions that count batches: `(i + 1) % n == 0`, wherever the answer is worked out."""

import ast
import re

from steadystep.lint.context import Context
from steadystep.lint.names import name_of
from steadystep.lint.script import Script
from steadystep.lint.targets import target_of

COUNTED = re.compile(r"accum|acc_steps|update_(freq|every|interval)|iter_size|grad_steps|virtual_b|micro", re.I)
"""Names of the number of micro-batches in a group."""

_DEEPEST = 4


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
