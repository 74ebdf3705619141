"""Where in the run of a script a statement is met."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import final

from steadystep.lint.bindings import default_of, parameters
from steadystep.lint.control import bind, outer
from steadystep.lint.events import Loop
from steadystep.lint.flow import UNKNOWN, answer
from steadystep.lint.managers import switches_off
from steadystep.lint.names import last, name_of
from steadystep.lint.script import Function, Script
from steadystep.lint.sources import named_sources
from steadystep.lint.unroll import Binding


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Loops, branches and names around a statement."""

    branch: tuple[tuple[int, int], ...] = ()
    loops: tuple[Loop, ...] = ()
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

    def within(self, loop: Loop) -> "Place":
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
