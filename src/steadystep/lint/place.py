"""Where in the run of a script a statement is met."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import final

from steadystep.lint.control import bind, outer, switches_off
from steadystep.lint.events import EnteredLoop
from steadystep.lint.flow import UNKNOWN, Binding, answer
from steadystep.lint.names import default_of, last, name_of, parameters
from steadystep.lint.script import Function, Script
from steadystep.lint.sources import named_sources


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Loops, branches and names around a statement."""

    branch: tuple[tuple[int, int], ...] = ()
    loops: tuple[EnteredLoop, ...] = ()
    no_grad: bool = False
    last_round: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    """What the outermost caller calls our parameters."""
    known: Mapping[str, object] = field(default_factory=dict)
    """Flags and phases whose value is sure here."""
    stack: tuple[Function, ...] = ()
    sites: tuple[ast.Call, ...] = ()
    """The calls that led here."""
    over: bool = False
    """Nothing after this is reached."""

    def entering(self, function: Function, call: ast.Call, script: Script) -> "Place":
        """The beginning of a function that is called here."""
        return replace(
            self,
            names=bind(function, call, self.names),
            known=_flags(function, call, self, script),
            stack=(*self.stack, function),
            sites=(*self.sites, call),
            no_grad=self.no_grad or switches_off(function, script),
        )

    def outer(self, name: str) -> str:
        """A name as the outermost caller writes it, with the keys that are sure."""
        if name.endswith("]") or "]." in name:
            head, _, rest = name.partition("[")
            key, _, tail = rest.partition("]")
            if isinstance(self.known.get(key), str):
                name = f"{head}[{self.known[key]!r}]{tail}"
        return outer(name, self.names)

    def within(self, loop: EnteredLoop) -> "Place":
        """Inside of a loop."""
        return replace(self, loops=(*self.loops, loop), last_round=False)

    def forgetting(self, names: set[str]) -> "Place":
        """Where a loop gives these names other values."""
        return replace(self, known={n: v for n, v in self.known.items() if n not in names})

    def words(self, node: ast.AST) -> frozenset[str]:
        """Names and texts in an expression, those of the callers included."""
        found = {str(n.value) for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        for part in ast.walk(node):
            if isinstance(part, ast.Name | ast.Attribute):
                name = name_of(part)
                found |= {last(name), *re.split(r"[.\[\]']+", outer(name, self.names))}
                found |= {str(self.known[name])} if isinstance(self.known.get(name), str) else set()
        return frozenset(found - {"", "self"})

    def with_bound(self, binding: Binding) -> "Place":
        """One pass of a loop that is written out."""
        names, known = dict(self.names), dict(self.known)
        for name, value in binding.items():
            names.pop(name, None)
            known.pop(name, None)
            if isinstance(value, str):
                names[name] = outer(value, self.names)
            else:
                known[name] = value[0]
        return replace(self, names=names, known=known)


def _flags(function: Function, call: ast.Call, place: Place, script: Script) -> dict[str, object]:
    """Parameters whose value is sure: what is given is a constant, or nothing is given and the default is one."""
    names = parameters(function)
    inherited = script.scope_of(function) in place.stack
    known = dict(place.known) if inherited else {}
    if any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords):
        return {n: v for n, v in known.items() if n not in names}
    offset = 1 if names[:1] in (["self"], ["cls"]) else 0
    given = dict(zip(names[offset:], call.args, strict=False)) | {k.arg: k.value for k in call.keywords if k.arg}
    for name in names[offset:]:
        known.pop(name, None)
        value = given.get(name, default_of(function, name))
        if value is None or (function, name) in script.assigned:
            continue
        if isinstance(value, ast.IfExp) and (sure := answer(value.test, place.known, script)) is not UNKNOWN:
            value = value.body if sure else value.orelse
        found = answer(value, place.known, script)
        if found is UNKNOWN and isinstance(value, ast.Name | ast.Attribute) and _is_made(value, script):
            found = value
        if found is UNKNOWN or isinstance(found, bool | str | ast.AST) or found is None:
            known |= {} if found is UNKNOWN else {name: found}
    return known


def _is_made(value: ast.expr, script: Script) -> bool:
    """An object that the file makes, so that it is not None."""
    found = named_sources(script, ast.unparse(value), value)
    return bool(found) and all(isinstance(source, ast.Call) for source, _ in found)


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
