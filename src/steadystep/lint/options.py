"""What a setting is where the script declares it: defaults of options, fields of a config, entries of a table."""

import ast
from collections.abc import Callable, Iterator
from typing import Protocol

from steadystep.lint.names import Function, annotation_of, last, name_of, path_of

Follow = Callable[[ast.expr], list[ast.expr]]
"""What an expression that is no table itself stands for."""

_HOLDERS = frozenset(
    [
        *("SimpleNamespace", "Namespace", "dict", "edict", "EasyDict", "Munch", "DotDict", "AttrDict", "create", "Box"),
        *("MappingProxyType", "OrderedDict", "defaultdict", "deepcopy", "copy", "ConfigDict", "Bunch", "DictConfig"),
        *("ModuleDict", "ModuleList", "ParameterDict", "list", "tuple", "ChainMap"),
    ]
)
_READERS = ("safe_load", "full_load", "loads", "create")
_SAME = ("copy", "to", "cuda", "train")
_PARSED = ("parse_args", "parse_known_args", "parse_intermixed_args")
_FILLED = (
    "cli",
    "structured",
    "parse",
    "ArgumentParser",
    "HfArgumentParser",
    "instantiate",
    "parse_args_into_dataclasses",
)
_MOST_ARGUMENTS = 400


def entry(table: ast.expr, key: object, follow: Follow, depth: int = 0) -> list[ast.expr]:
    """What stands under a key, a place or a name; empty when the table does not say."""
    if depth > 6:
        return []
    match table:
        case ast.Dict():
            return _of_dict(table, key, follow, depth)
        case ast.List(elts=entries) | ast.Tuple(elts=entries):
            inside = isinstance(key, int) and not isinstance(key, bool) and -len(entries) <= key < len(entries)
            plain = not any(isinstance(e, ast.Starred) for e in entries)
            return [entries[int(key)]] if inside and plain else []  # type: ignore[call-overload]
        case ast.BinOp(op=ast.BitOr()):
            return entry(table.right, key, follow, depth + 1) or entry(table.left, key, follow, depth + 1)
        case ast.Call(func=ast.Attribute(attr=method, value=inner)) if method in _SAME and name_of(inner) != "copy":
            return entry(inner, key, follow, depth + 1)
        case ast.Call(args=[ast.Constant(value=str() as text), *_]) if last(name_of(table.func)) in _READERS:
            read = _read(text, table)
            return entry(read, key, follow, depth + 1) if read is not None else []
        case ast.Call() if last(name_of(table.func)) in _HOLDERS:
            given = [k.value for k in table.keywords if k.arg == key]
            spread = [k.value for k in table.keywords if k.arg is None]
            for inner in () if given else (*reversed(spread), *table.args[:1]):
                given = entry(inner, key, follow, depth + 1)
                if given:
                    break
            return given
    return [found for inner in follow(table) if inner is not table for found in entry(inner, key, follow, depth + 1)]


def _read(text: str, at: ast.Call) -> ast.expr | None:
    """A config that stands in the script as YAML or JSON."""
    import yaml

    try:
        table = ast.parse(repr(yaml.safe_load(text)), mode="eval").body
    except (yaml.YAMLError, SyntaxError, ValueError, RecursionError):
        return None
    for node in ast.walk(table):
        ast.copy_location(node, at)
    return table


def _of_dict(table: ast.Dict, key: object, follow: Follow, depth: int) -> list[ast.expr]:
    """The last one counts."""
    for name, value in reversed(list(zip(table.keys, table.values, strict=True))):
        if isinstance(name, ast.Constant) and name.value == key:
            return [value]
        if name is None:
            inner = entry(value, key, follow, depth + 1)
            if inner:
                return inner
    return []


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

    def scope_of(self, node: ast.AST) -> Function | None:
        """The function around a node."""


def field_of(script: Declared, name: str, at: ast.AST) -> list[ast.expr]:
    """`args.lr`, `cfg.lr`, `Config.lr`: what is declared for it; empty when the file does not tell."""
    owner, _, field = name.rpartition(".")
    if owner in script.classes:
        return list(_of_class(script, script.classes[owner], field))
    found: list[ast.expr] = []
    for value in _distinct(script.values(owner, at)):
        found += _of_value(script, value, field, 0)
    scope = script.scope_of(at)
    annotated = last(name_of(annotation_of(scope, owner))) if scope is not None and not found else ""
    return found or (list(_of_class(script, script.classes[annotated], field)) if annotated in script.classes else [])


def entry_of(script: Declared, name: str, at: ast.AST) -> list[ast.expr]:
    """`table['key']` of a table that is written out."""
    base, _, key = name[:-1].rpartition("[")
    values = _distinct(script.values(base, at))
    if len(values) > 1:  # nets = {k: net.to(device) for k, net in nets.items()}
        values = [v for v in values if base not in {path_of(n) for n in ast.walk(v)}]
    if len(values) != 1:
        return []
    if not key or key[0] not in "'\"-0123456789":
        return []  # the key is a name
    wanted = ast.literal_eval(key)

    def follow(table: ast.expr) -> list[ast.expr]:
        if path_of(table):
            return script.values(path_of(table), table) if path_of(table) != base else []
        if isinstance(table, ast.Call) and name_of(table.func) == "vars" and table.args and isinstance(wanted, str):
            return [
                ast.Dict(keys=[ast.Constant(wanted)], values=[v]) for v in _of_value(script, table.args[0], wanted, 0)
            ]
        return _returned(script, table)

    return entry(values[0], wanted, follow)


def option_of(function: Function, name: str) -> list[ast.expr]:
    """The default of `@click.option("--name", default=...)` for a parameter."""
    for decorator in function.decorator_list:
        option = isinstance(decorator, ast.Call) and last(name_of(decorator.func)) in ("option", "argument")
        if isinstance(decorator, ast.Call) and option and name in _destinations(decorator):
            return [k.value for k in decorator.keywords if k.arg == "default"]
    return []


def _distinct(values: list[ast.expr]) -> list[ast.expr]:
    return list({id(value): value for value in values}.values())


def _returned(script: Declared, call: ast.expr) -> list[ast.expr]:
    """What a function of this file gives back."""
    made = script.functions.get(name_of(call.func), []) if isinstance(call, ast.Call) else []
    returns = [n for f in made for n in ast.walk(f) if isinstance(n, ast.Return)]
    return [r.value for r in returns if r.value is not None] if len(made) == 1 else []


def _of_value(script: Declared, value: ast.expr, field: str, depth: int) -> list[ast.expr]:
    if depth > 5:
        return []
    if path_of(value):
        return list(script.values(f"{path_of(value)}.{field}", value))
    listed = entry(value, field, lambda inner: script.values(path_of(inner), inner) if path_of(inner) else [])
    if listed or not isinstance(value, ast.Call):
        return listed
    leaf = value.func.attr if isinstance(value.func, ast.Attribute) else name_of(value.func)
    if leaf in _PARSED:
        return list(_arguments(script, field))
    if leaf in ("replace", "_replace", "deepcopy", "copy"):
        changed = [k.value for k in value.keywords if k.arg == field]
        of = (
            value.func.value
            if leaf == "_replace" and isinstance(value.func, ast.Attribute)
            else next(iter(value.args), None)
        )
        return changed or (_of_value(script, of, field, depth + 1) if of is not None else [])
    made = [leaf, *(last(name_of(n)) for a in value.args[:2] for n in ast.walk(a))] if leaf in _FILLED else [leaf]
    for name in made:
        if name in script.classes:
            return (
                _given_to(script, value, script.classes[name], field)
                if name == leaf
                else list(_of_class(script, script.classes[name], field))
            )
    return [found for inner in _returned(script, value) for found in _of_value(script, inner, field, depth + 1)]


def _given_to(script: Declared, call: ast.Call, owner: ast.ClassDef, field: str) -> list[ast.expr]:
    """What a constructor is given for a field, else what the class says."""
    given = [k.value for k in call.keywords if k.arg == field]
    fields = [name_of(s.target) for s in owner.body if isinstance(s, ast.AnnAssign)]
    plain = not any(isinstance(s, ast.FunctionDef) and s.name == "__init__" for s in owner.body)
    if not given and plain and field in fields and fields.index(field) < len(call.args):
        given = [call.args[fields.index(field)]]
    return given or list(_of_class(script, owner, field))


def _arguments(script: Declared, field: str) -> Iterator[ast.expr]:
    for call in script.calls.get("add_argument", ())[:_MOST_ARGUMENTS]:
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


def _of_class(script: Declared, owner: ast.ClassDef, field: str, depth: int = 0) -> Iterator[ast.expr]:
    """Fields of a class and what its methods set on `self`, or those of the class it comes from."""
    found = False
    for stmt in owner.body:
        if isinstance(stmt, ast.AnnAssign) and name_of(stmt.target) == field and stmt.value is not None:
            found = True
            yield _plain(stmt.value)
        elif isinstance(stmt, ast.Assign) and field in {path_of(t) for t in stmt.targets}:
            found = True
            yield stmt.value
    for stmt, value in script.named.get(f"self.{field}", ()):
        if script.class_of(stmt) is owner:
            found = True
            yield value
    for base in () if found or depth > 3 else owner.bases:
        if last(name_of(base)) in script.classes:
            yield from _of_class(script, script.classes[last(name_of(base))], field, depth + 1)


def _plain(value: ast.expr) -> ast.expr:
    """`field(default=1e-3)` is 1e-3, and `field(default_factory=Optim)` is an `Optim()`."""
    if isinstance(value, ast.Call) and last(name_of(value.func)) in ("field", "Field"):
        given = {k.arg: k.value for k in value.keywords}
        factory = given.get("default_factory")
        if isinstance(factory, ast.Lambda):
            return factory.body
        if factory is not None and name_of(factory):
            return ast.copy_location(ast.Call(func=factory, args=[], keywords=[]), factory)
        return given.get("default") or (value.args[0] if value.args else value)
    return value
