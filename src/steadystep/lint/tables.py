"""Entries of tables that are written out: `{"lr": 1}`, `dict(lr=1)`, `{**base, "lr": 1}`, `base | {"lr": 1}`."""

import ast
from collections.abc import Callable

from steadystep.lint.names import last, name_of

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
