"""What callers in the same file give to a parameter, and what a class gives to its attributes."""

import ast
from typing import Protocol

from steadystep.lint.bindings import Bound, Function, default_of, parameters, passed
from steadystep.lint.names import name_of
from steadystep.lint.options import option_of

_MOST_CALLERS = 12  # beyond so many a parameter may be anything


class Values(Protocol):
    """What is asked of a script here."""

    classes: dict[str, ast.ClassDef]
    calls: dict[str, list[ast.Call]]
    named: dict[str, list[tuple[ast.stmt, ast.expr]]]

    def bound(self, name: str, at: ast.AST) -> list[Bound]:
        """What a name may stand for."""

    def with_part(self, stmt: ast.stmt, name: str, value: ast.expr) -> Bound:
        """A value, and which part of it a statement gives to a name."""

    def class_of(self, node: ast.AST | None) -> ast.ClassDef | None:
        """The class around a node."""

    def scope_of(self, node: ast.AST) -> Function | None:
        """The function around a node."""


def given(script: Values, function: Function, name: str) -> list[Bound]:
    """What callers in this file pass for a parameter; without callers its default, then anything of that name."""
    names = parameters(function)
    position = names.index(name) - (1 if names[:1] in (["self"], ["cls"]) else 0)
    owner = script.class_of(function)
    sites = makes(script, owner) if function.name == "__init__" and owner else script.calls.get(function.name, [])
    parts = [c for c in script.calls.get("partial", ()) if c.args and name_of(c.args[0]) == function.name]
    if len(sites) + len(parts) > _MOST_CALLERS:
        return []
    default = next(iter(option_of(function, name)), default_of(function, name))
    found: list[Bound] = []
    for call in (*sites, *parts):
        value = passed(call, position + (call in parts), name)
        if value is None:
            found += [(default, None)] if default is not None else []
        elif isinstance(value, ast.Name | ast.Attribute):
            found += script.bound(name_of(value), call) or [(value, None)]
        else:
            found.append((value, None))
    if sites or parts or default is not None:
        return found if sites or parts or default is None else [(default, None)]
    if function.name == "__init__":
        return []
    return [script.with_part(s, name, v) for s, v in script.named.get(name, ())]


def spread(script: Values, function: Function) -> list[ast.expr]:
    """What callers give to `**kw`, as tables."""
    owner = script.class_of(function)
    sites = makes(script, owner) if function.name == "__init__" and owner else script.calls.get(function.name, [])
    own = set(parameters(function))
    tables: list[ast.expr] = []
    for call in sites[:_MOST_CALLERS]:
        rest = [k for k in call.keywords if k.arg not in own]
        keys: list[ast.expr | None] = [ast.Constant(value=k.arg) if k.arg else None for k in rest]
        tables.append(ast.copy_location(ast.Dict(keys=keys, values=[k.value for k in rest]), call))
    return tables


def makes(script: Values, owner: ast.ClassDef, depth: int = 0) -> list[ast.Call]:
    """Where a class is made, or one that comes from it and has no `__init__` of its own, or calls this one."""
    sites = list(script.calls.get(owner.name, ()))
    for other in script.classes.values() if depth < 4 else ():
        if owner.name in {name_of(b) for b in other.bases}:
            own = [m for m in other.body if isinstance(m, ast.FunctionDef) and m.name == "__init__"]
            above = [c for c in script.calls.get("__init__", ()) if own and script.scope_of(c) is own[0]]
            sites += above if own else makes(script, other, depth + 1) if other is not owner else []
    return sites


def of_class(script: Values, owner: ast.ClassDef | None, field: str, depth: int = 0) -> list[ast.expr]:
    """What stands in the body of a class, and what the classes of this file it comes from set."""
    if owner is None or depth > 3:
        return []
    found = [value for stmt, value in script.named.get(field, ()) if stmt in owner.body]
    for base in (script.classes.get(name_of(b)) for b in owner.bases):
        if base is not None and base is not owner:
            found += [v for s, v in script.named.get(f"self.{field}", ()) if script.class_of(s) is base]
            found += of_class(script, base, field, depth + 1)
    return found
