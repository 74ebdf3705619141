"""Which questions in a script are the same: `if fp16:` twice is one, and so is `if phase == "train":`."""

import ast
from typing import final

from steadystep.lint.control import outer
from steadystep.lint.names import name_of
from steadystep.lint.place import Place
from steadystep.lint.script import Script


@final
class Questions:
    """Numbers them in the order they are met."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._numbers: dict[tuple[object, ...], int] = {}

    def number(self, test: ast.expr, place: Place, new: int) -> tuple[int, bool, ast.expr]:
        """A number for what an `if` asks, whether it asks the opposite, and the question without that."""
        flipped = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        asked = test.operand if isinstance(test, ast.UnaryOp) and flipped else test
        key = _key(asked)
        if key is None:
            return new, False, test
        name, text, negated = key
        # why only names and comparisons of one with a constant: a call may have another answer the second time
        about = (outer(name, place.names), text, self._bound_in(name, place))
        return self._numbers.setdefault(about, new), flipped != negated, asked if flipped else test

    def _bound_in(self, name: str, place: Place) -> tuple[object, ...]:
        """The loops that may change it, and the function if it is a name of its own."""
        head = name.partition(".")[0]
        own = place.stack[-1] if place.stack and head not in place.names else None
        return (own, *(loop for loop in place.loops if self._changes(loop.node, name, head)))

    def _changes(self, loop: ast.AST, name: str, head: str) -> bool:
        key = ("changes", loop, name)
        if key not in self._script.memo:
            stored = (n for n in ast.walk(loop) if isinstance(getattr(n, "ctx", None), ast.Store))
            names = {name_of(n) for n in stored}
            self._script.memo[key] = name in names or head in names or "." in name
        return bool(self._script.memo[key])


def _key(asked: ast.expr) -> tuple[str, str, bool] | None:
    if name_of(asked):
        return name_of(asked), "", False
    match asked:
        case ast.Compare(left=left, ops=[op], comparators=[ast.Constant(value=value)]) if name_of(left):
            if isinstance(op, ast.Eq | ast.Is):
                return name_of(left), repr(value), False
            if isinstance(op, ast.NotEq | ast.IsNot):
                return name_of(left), repr(value), True
    return None
