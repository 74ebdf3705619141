"""Questions about a number being finite: `isnan(x)`, `not math.isfinite(x)`, `x != x`."""

import ast

from steadystep.lint.names import last, name_of
from steadystep.lint.rules.trained import cut_value

ASKS_BAD = ("isnan", "isinf")
ASKS_GOOD = ("isfinite",)

SAY_SO = """if not torch.isfinite(loss):
    logger.warning("loss is %s at step %d", loss.item(), step)"""
"""What to do instead of hiding it."""


def asks(test: ast.expr, name: str, *, good: bool) -> bool:
    """Whether a test is `isnan(name)` or the like; with `good` whether it is true of finite values."""
    if isinstance(test, ast.BoolOp):
        return all(asks(part, name, good=good) for part in test.values)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return asks(test.operand, name, good=not good)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and "inf" in ast.unparse(test.comparators[0]):
        asked_of = name_of(test.left) or ast.unparse(test.left).removeprefix("abs(").removesuffix(")")
        fine = isinstance(test.ops[0], ast.NotIn | ast.NotEq | ast.Lt)
        return asked_of == name and fine == good
    if isinstance(test, ast.Compare) and len(test.ops) == 1:  # only NaN differs from itself
        twice = name_of(test.left) == name == name_of(test.comparators[0])
        return twice and isinstance(test.ops[0], ast.Eq if good else ast.NotEq)
    if not isinstance(test, ast.Call):
        return False
    if (
        last(name_of(test.func)) in ("any", "all", "bool", "item")
        and not test.args
        and isinstance(test.func, ast.Attribute)
    ):
        return asks(test.func.value, name, good=good)  # torch.isnan(loss).any()
    asked = last(name_of(test.func))
    about = [name_of(cut_value(n)) for n in (*test.args, getattr(test.func, "value", test))]
    return name in about and asked in (ASKS_GOOD if good else ASKS_BAD)
