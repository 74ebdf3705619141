"""A training script as a syntax tree with its names looked up. It is read, never run and never imported."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from typing import final

from steadystep.check.bindings import Function, bindings, default_of, parameters, parse, passed
from steadystep.check.names import full_name, imports_of, name_of
from steadystep.check.options import entry_of, field_of, option_of

__all__ = ["Function", "Scope", "Script"]

Scope = Function | None
"""Where a name lives: a function, or None for the module."""

_MOST_CALLERS = 12  # beyond so many a parameter may be anything


@final
class Script:
    """Source, tree, and who is who in it."""

    def __init__(self, text: str, path: str = "script.py") -> None:
        self.path, self.text = path, text
        self.lines = text.splitlines()
        self.tree = parse(text, path)
        self.imports = imports_of(self.tree)
        self.parents: dict[ast.AST, ast.AST] = {}
        self.functions: dict[str, list[Function]] = defaultdict(list)
        self.classes: dict[str, ast.ClassDef] = {}
        self.assigned: dict[tuple[Scope, str], list[tuple[ast.stmt, ast.expr]]] = defaultdict(list)
        self.named: dict[str, list[tuple[ast.stmt, ast.expr]]] = defaultdict(list)
        self.calls: dict[str, list[ast.Call]] = defaultdict(list)
        """By the last part of what is called."""
        self._values: dict[tuple[ast.AST | None, str], list[ast.expr]] = {}
        self.nodes: list[ast.AST] = list(ast.walk(self.tree))
        for node in self.nodes:
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
        for node in self.nodes:
            self._note(node)

    def _note(self, node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.functions[node.name].append(node)
        elif isinstance(node, ast.ClassDef):
            self.classes[node.name] = node
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else name_of(node.func)
            self.calls[name].append(node)
        for target, value in bindings(node):
            assert isinstance(node, ast.stmt)
            self.assigned[self.scope_of(node), target].append((node, value))
            self.named[target].append((node, value))

    def scope_of(self, node: ast.AST) -> Scope:
        """The function a node is in."""
        parent = self.parents.get(node)
        while parent is not None:
            if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
                return parent
            parent = self.parents.get(parent)
        return None

    def class_of(self, node: ast.AST | None) -> ast.ClassDef | None:
        """The class whose method a node is in."""
        while node is not None:
            node = self.parents.get(node)
            if isinstance(node, ast.ClassDef):
                return node
        return None

    def stmt_of(self, node: ast.AST) -> ast.stmt:
        """The statement a node is part of."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Parents, nearest first, up to the function's edge."""
        parent = self.parents.get(node)
        while parent is not None and not isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield parent
            parent = self.parents.get(parent)

    def full(self, node: ast.AST | None) -> str:
        """A name with its import written out."""
        return full_name(node, self.imports)

    def values(self, name: str, at: ast.AST) -> list[ast.expr]:
        """What a name may stand for at that place; empty when the file does not tell."""
        if not name:
            return []
        key = (self.class_of(at) if name.startswith("self.") else self.scope_of(at), name)
        if key not in self._values:
            self._values[key] = []  # why: a name that leads back to itself says nothing
            self._values[key] = [*self._look_up(name, at), *self._declared(name, at)]
        return self._values[key]

    def _look_up(self, name: str, at: ast.AST) -> list[ast.expr]:
        scope = self.scope_of(at)
        if name.startswith("self."):
            owner = self.class_of(at)
            return [v for s, v in self.named.get(name, ()) if self.class_of(s) is owner]
        while scope is not None:
            if (scope, name) in self.assigned:
                return [value for _, value in self.assigned[scope, name]]
            if name in parameters(scope):
                return self._given(scope, name)
            scope = self.scope_of(scope)
        return [value for _, value in self.assigned.get((None, name), ())]

    def _declared(self, name: str, at: ast.AST) -> list[ast.expr]:
        """What a table, a config or the class itself says, next to what is assigned."""
        if name.endswith("]"):
            return entry_of(self, name, at)
        if name.count(".") == 1 and name.startswith("self."):
            return self._of_class(self.class_of(at), name[5:], 0)
        return field_of(self, name, at) if "." in name else []

    def _of_class(self, owner: ast.ClassDef | None, field: str, depth: int) -> list[ast.expr]:
        """What stands in the body of a class, and what the classes of this file it comes from set."""
        if owner is None or depth > 3:
            return []
        found = [value for stmt, value in self.named.get(field, ()) if stmt in owner.body]
        for base in (self.classes.get(name_of(b)) for b in owner.bases):
            if base is not None:
                found += [v for s, v in self.named.get(f"self.{field}", ()) if self.class_of(s) is base]
                found += self._of_class(base, field, depth + 1)
        return found

    def _given(self, function: Function, name: str) -> list[ast.expr]:
        """What callers in this file pass for a parameter; without callers its default, then anything of that name."""
        names = parameters(function)
        position = names.index(name) - (1 if names[:1] in (["self"], ["cls"]) else 0)
        owner = self.class_of(function)
        sites = self.calls.get(owner.name if function.name == "__init__" and owner else function.name, ())
        parts = [c for c in self.calls.get("partial", ()) if c.args and name_of(c.args[0]) == function.name]
        if len(sites) + len(parts) > _MOST_CALLERS:
            return []
        default = next(iter(option_of(function, name)), default_of(function, name))
        found: list[ast.expr] = []
        for call in (*sites, *parts):
            given = passed(call, position + (call in parts), name)
            if given is None:
                found += [default] if default is not None else []
            elif isinstance(given, ast.Name | ast.Attribute):
                found += self.values(name_of(given), call) or [given]
            else:
                found.append(given)
        if sites or parts or default is not None:
            return found if sites or parts or default is None else [default]
        return [] if function.name == "__init__" else [value for _, value in self.named.get(name, ())]

    def reaching(self, name: str, at: ast.AST) -> tuple[ast.stmt, ast.expr] | None:
        """The last assignment to a name above that place, in the same function."""
        place = self.stmt_of(at)
        before = [a for a in self.assigned.get((self.scope_of(at), name), ()) if a[0].lineno < place.lineno]
        return max(before, key=lambda a: a[0].lineno, default=None)

    def loops_of(self, node: ast.AST) -> list[ast.For | ast.AsyncFor | ast.While]:
        """The loops around a node in its function, innermost first."""
        return [a for a in self.ancestors(node) if isinstance(a, ast.For | ast.AsyncFor | ast.While)]
