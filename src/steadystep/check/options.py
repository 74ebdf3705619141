"""What a setting is where the script declares it: defaults of options, fields of a config, entries of a table."""

import ast
from collections.abc import Iterator
from typing import Protocol

from steadystep.check.bindings import Function
from steadystep.check.names import last, name_of, path_of

_PARSED = ("parse_args", "parse_known_args")
_HOLDERS = ("SimpleNamespace", "Namespace", "dict", "edict", "EasyDict", "Munch", "DotDict", "AttrDict", "create")


class Declared(Protocol):
    """What is asked of a script here."""

    classes: dict[str, ast.ClassDef]
    functions: dict[str, list[Function]]
    calls: dict[str, list[ast.Call]]
    named: dict[str, list[tuple[ast.stmt, ast.expr]]]

    def values(self, name: str, at: ast.AST) -> list[ast.expr]:
        """What a name may stand for."""

    def class_of(self, node: ast.AST | None) -> ast.ClassDef | None:
        """The class around a node."""


def field_of(script: Declared, name: str, at: ast.AST) -> list[ast.expr]:
    """`args.lr`, `cfg.lr`, `Config.lr`: what is declared for it; empty when the file does not tell."""
    owner, _, field = name.rpartition(".")
    if owner in script.classes:
        return list(_of_class(script, script.classes[owner], field))
    found: list[ast.expr] = []
    for value in _distinct(script.values(owner, at)):
        found += _of_value(script, value, field)
    return found


def entry_of(script: Declared, name: str, at: ast.AST) -> list[ast.expr]:
    """`table['key']` of a table that is written out."""
    base, _, key = name[:-1].rpartition("[")
    values = _distinct(script.values(base, at))
    if len(values) != 1:
        return []
    table, wanted = values[0], ast.literal_eval(key)
    if isinstance(table, ast.Dict):
        pairs = zip(table.keys, table.values, strict=True)
        return [v for k, v in pairs if isinstance(k, ast.Constant) and k.value == wanted]
    if isinstance(table, ast.List | ast.Tuple) and isinstance(wanted, int) and -len(table.elts) <= wanted:
        return [table.elts[wanted]] if wanted < len(table.elts) else []
    return _held(table, wanted) if isinstance(table, ast.Call) else []


def option_of(function: Function, name: str) -> list[ast.expr]:
    """The default of `@click.option("--name", default=...)` for a parameter."""
    for decorator in function.decorator_list:
        option = isinstance(decorator, ast.Call) and last(name_of(decorator.func)) in ("option", "argument")
        if isinstance(decorator, ast.Call) and option and name in _destinations(decorator):
            return [k.value for k in decorator.keywords if k.arg == "default"]
    return []


def _distinct(values: list[ast.expr]) -> list[ast.expr]:
    return list({id(value): value for value in values}.values())


def _of_value(script: Declared, value: ast.expr, field: str) -> list[ast.expr]:
    if isinstance(value, ast.Dict):
        return [v for k, v in zip(value.keys, value.values, strict=True) if getattr(k, "value", None) == field]
    if not isinstance(value, ast.Call):
        return []
    leaf = value.func.attr if isinstance(value.func, ast.Attribute) else name_of(value.func)
    if leaf in _PARSED or (leaf in script.functions and _parses(script, leaf)):
        return list(_arguments(script, field))
    if leaf in _HOLDERS:
        return _held(value, field)
    if leaf in script.classes:
        given = [k.value for k in value.keywords if k.arg == field]
        return given or list(_of_class(script, script.classes[leaf], field))
    return []


def _parses(script: Declared, name: str) -> bool:
    """A function of the file that gives back what argparse has read."""
    called = {
        n.func.attr
        for f in script.functions[name]
        for n in ast.walk(f)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
    }
    return bool(called & set(_PARSED))


def _arguments(script: Declared, field: str) -> Iterator[ast.expr]:
    for call in script.calls.get("add_argument", ()):
        if field in _destinations(call):
            yield from (k.value for k in call.keywords if k.arg == "default")
    for call in script.calls.get("set_defaults", ()):
        yield from (k.value for k in call.keywords if k.arg == field)


def _destinations(call: ast.Call) -> set[str]:
    """The names under which an option may be read."""
    named = next((k.value for k in call.keywords if k.arg == "dest"), None)
    if isinstance(named, ast.Constant):
        return {str(named.value)}
    words = [str(a.value) for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return {word.lstrip("-").replace("-", "_") for word in words}


def _held(call: ast.Call, field: object) -> list[ast.expr]:
    """`SimpleNamespace(lr=1e-3)`, `dict(lr=1e-3)`, `EasyDict({"lr": 1e-3})`."""
    found = [k.value for k in call.keywords if k.arg == field]
    for table in call.args[:1]:
        if isinstance(table, ast.Dict):
            pairs = zip(table.keys, table.values, strict=True)
            found += [v for k, v in pairs if isinstance(k, ast.Constant) and k.value == field]
    return found


def _of_class(script: Declared, owner: ast.ClassDef, field: str) -> Iterator[ast.expr]:
    """Fields of a class and what its methods set on `self`."""
    for stmt in owner.body:
        if isinstance(stmt, ast.AnnAssign) and name_of(stmt.target) == field and stmt.value is not None:
            yield _plain(stmt.value)
        elif isinstance(stmt, ast.Assign) and field in {path_of(t) for t in stmt.targets}:
            yield stmt.value
    yield from (v for s, v in script.named.get(f"self.{field}", ()) if script.class_of(s) is owner)


def _plain(value: ast.expr) -> ast.expr:
    """`field(default=1e-3)` is 1e-3."""
    if isinstance(value, ast.Call) and last(name_of(value.func)) in ("field", "Field"):
        given = next((k.value for k in value.keywords if k.arg == "default"), None)
        return given or (value.args[0] if value.args else value)
    return value
