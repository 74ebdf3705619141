"""A training script as a syntax tree with its names looked up. It is read, never run and never imported."""

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, final

from steadystep.lint.bindings import Bound, Function, bindings, parameters, parse
from steadystep.lint.given import given, of_class, spread
from steadystep.lint.names import full_name, imports_of, name_of
from steadystep.lint.options import entry_of, field_of

__all__ = ["Bound", "Function", "Scope", "Script"]

Answer = TypeVar("Answer")
Scope = Function | None
"""Where a name lives: a function, or None for the module."""


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
        self.memo: dict[tuple[object, ...], Any] = {}
        """What was worked out about this script before, by whoever asked."""
        self._parts: dict[tuple[ast.stmt, str], int | None] = {}
        self._scopes: dict[ast.AST, Scope] = {}
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
            if name != "eval" or not node.args:  # `eval(text)`, `editdistance.eval(a, b)`: no mode of a network
                self.calls[name].append(node)
        for target, value, part in bindings(node):
            assert isinstance(node, ast.stmt)
            self._parts[node, target] = part
            self.assigned[self.scope_of(node), target].append((node, value))
            self.named[target].append((node, value))

    def once(self, key: str, ask: Callable[[], Answer]) -> Answer:
        """What `ask` says about this script, worked out the first time: rules ask for every loop, network and call."""
        if (key,) not in self.memo:
            self.memo[key,] = ask()
        answer: Answer = self.memo[key,]
        return answer

    @property
    def attributes(self) -> set[str]:
        """Every name behind a dot."""
        return self.once("attributes", lambda: {n.attr for n in self.nodes if isinstance(n, ast.Attribute)})

    def scope_of(self, node: ast.AST) -> Scope:
        """The function a node is in."""
        if node not in self._scopes:
            parent = self.parents.get(node)
            inside = isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef)
            while parent is not None and not inside and parent not in self._scopes:
                parent = self.parents.get(parent)
                inside = isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef)
            found = parent if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef) else None
            self._scopes[node] = found if inside or parent is None else self._scopes[parent]
        return self._scopes[node]

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
        return [value for value, _ in self.bound(name, at)]

    def bound(self, name: str, at: ast.AST) -> list[Bound]:
        """The same, and which part of the value it is, where a tuple was taken apart."""
        if not name:
            return []
        key = ("bound", self.class_of(at) if name.startswith("self.") else self.scope_of(at), name)
        if key not in self.memo:
            self.memo[key] = []  # why: a name that leads back to itself says nothing
            self.memo[key] = [*self._look_up(name, at), *((v, None) for v in self._declared(name, at))]
        found: list[Bound] = self.memo[key]
        return found

    def _look_up(self, name: str, at: ast.AST) -> list[Bound]:
        scope = self.scope_of(at)
        if name.startswith("self."):
            owner = self.class_of(at)
            return [self.with_part(s, name, v) for s, v in self.named.get(name, ()) if self.class_of(s) is owner]
        while scope is not None:
            if (scope, name) in self.assigned:
                return [self.with_part(s, name, v) for s, v in self.assigned[scope, name]]
            if name in parameters(scope):
                return given(self, scope, name)
            if scope.args.kwarg is not None and scope.args.kwarg.arg == name:
                return [(table, None) for table in spread(self, scope)]
            scope = self.scope_of(scope)
        return [self.with_part(s, name, v) for s, v in self.assigned.get((None, name), ())]

    def with_part(self, stmt: ast.stmt, name: str, value: ast.expr) -> Bound:
        """A value, and which part of it a statement gives to a name."""
        return value, self._parts.get((stmt, name))

    def _declared(self, name: str, at: ast.AST) -> list[ast.expr]:
        """What a table, a config or the class itself says, next to what is assigned."""
        if name.endswith("]"):
            return entry_of(self, name, at)
        if name.count(".") == 1 and name.startswith("self."):
            return of_class(self, self.class_of(at), name[5:])
        if name.startswith("self.hparams.") and "save_hyperparameters" in self.calls:
            owner = self.class_of(at)
            made = [f for f in self.functions.get("__init__", ()) if owner is not None and self.parents.get(f) is owner]
            return [v for f in made if name[13:] in parameters(f) for v, _ in given(self, f, name[13:])]
        return field_of(self, name, at) if "." in name else []

    def reaching(self, name: str, at: ast.AST) -> tuple[ast.stmt, ast.expr] | None:
        """The last assignment to a name above that place, in the same function."""
        place = self.stmt_of(at)
        before = [a for a in self.assigned.get((self.scope_of(at), name), ()) if a[0].lineno < place.lineno]
        return max(before, key=lambda a: a[0].lineno, default=None)

    def loops_of(self, node: ast.AST) -> list[ast.For | ast.AsyncFor | ast.While]:
        """The loops around a node in its function, innermost first."""
        return [a for a in self.ancestors(node) if isinstance(a, ast.For | ast.AsyncFor | ast.While)]
