"""A training script as a syntax tree with its names looked up. It is read, never run and never imported."""

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar, final

from steadystep.lint.names import (
    Bound,
    Function,
    bindings,
    default_of,
    full_name,
    imports_of,
    name_of,
    parameters,
    parse_script,
    passed,
)
from steadystep.lint.options import entry_of, field_of, option_of
from steadystep.lint.project import Linked

_MOST_CALLERS = 12  # beyond so many a parameter may be anything
__all__ = ["Bound", "Function", "Script", "ScriptScope"]
Answer = TypeVar("Answer")
ScriptScope = Function | None
"""Where a name lives: a function, or None for the module."""


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


def _names(value: ast.expr, name: str) -> bool:
    return any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(value))


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


def spread_over(script: Values, function: Function) -> list[ast.expr]:
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


@final
class Script:
    """Source, tree, and who is who in it."""

    def __init__(self, text: str, path: str = "script.py", linked: Linked | None = None) -> None:
        self.linked = linked or Linked()
        self.path, self.text = path, "\n".join([text, *self.linked.lines])
        self.lines = text.splitlines()
        self.own = len(self.lines)
        """How many lines are the script's; those behind it are of other files of its project."""
        self.lines += self.linked.lines
        self.tree = parse_script(text, path)
        known = imports_of(self.tree) | self.linked.imports
        self.imports = {name: full for name, full in known.items() if name not in self.linked.replaced}
        self.tree.body += self.linked.statements
        self.parents: dict[ast.AST, ast.AST] = {}
        self.functions: dict[str, list[Function]] = defaultdict(list)
        self.classes: dict[str, ast.ClassDef] = {}
        self.assigned: dict[tuple[ScriptScope, str], list[tuple[ast.stmt, ast.expr]]] = defaultdict(list)
        self.named: dict[str, list[tuple[ast.stmt, ast.expr]]] = defaultdict(list)
        self.calls: dict[str, list[ast.Call]] = defaultdict(list)
        """By the last part of what is called."""
        self.memo: dict[tuple[object, ...], Any] = {}
        """What was worked out about this script before, by whoever asked."""
        self._parts: dict[tuple[ast.stmt, str], int | None] = {}
        self._scopes: dict[ast.AST, ScriptScope] = {}
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

    def is_foreign(self, node: ast.AST) -> bool:
        """Whether a node stands in another file of the project."""
        return int(getattr(node, "lineno", 0)) > self.own

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

    def scope_of(self, node: ast.AST) -> ScriptScope:
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
                found = [self.with_part(s, name, v) for s, v in self.assigned[scope, name]]
                again = name in parameters(scope) and any(_names(v, name) for v, _ in found)  # `net = net.to(device)`
                return [*found, *given(self, scope, name)] if again else found
            if name in parameters(scope):
                return given(self, scope, name)
            if scope.args.kwarg is not None and scope.args.kwarg.arg == name:
                return [(table, None) for table in spread_over(self, scope)]
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
