"""What an expression comes from: names followed, wrappers taken off, functions of the file that make it gone into."""

import ast
from collections.abc import Callable, Iterator

from steadystep.lint.names import KEEPS, last, name_of, path_of
from steadystep.lint.script import Bound, Function, Script

Look = Callable[[ast.expr], list[Bound]]
"""How names are followed."""

_TABLES = ("ModuleDict", "ModuleList", "dict", "list", "tuple", "OrderedDict", "reversed", "sorted", "iter", "tqdm")
_COMPREHENSIONS = ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp
_WRAPS = frozenset(
    ["compile", "DataParallel", "DistributedDataParallel", "DDP", "FSDP", "convert_sync_batchnorm", "script"]
)
_HANDS_BACK = frozenset(["prepare", "setup", "setup_module", "prepare_model", "setup_optimizers", "prepare_optimizer"])
"""Of a framework: what goes in comes out."""
_DEEPEST = 10


def loop_values(script: Script, name: str, node: ast.AST, look: Look) -> list[Bound] | None:
    """What the loop variable may be, of the innermost loop or comprehension around that has it; None without one."""
    for around in script.ancestors(node):
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(around, ast.For | ast.AsyncFor):
            pairs = [(around.target, around.iter)]
        elif isinstance(around, _COMPREHENSIONS):
            pairs = [(g.target, g.iter) for g in around.generators]
        for target, over in pairs:
            place = _place(target, name)
            if place is not None and not _is_in(script, node, over):
                return list(_each(over, place, look, 0))
    return None


def elements(table: ast.expr, look: Look, depth: int = 0) -> Iterator[Bound]:
    """The entries of a list or a table."""
    if depth > 3:
        return
    match table:
        case ast.List(elts=entries) | ast.Tuple(elts=entries) | ast.Set(elts=entries):
            for i, entry in enumerate(entries):
                if isinstance(entry, ast.Starred):
                    yield from elements(entry.value, look, depth + 1)
                else:
                    yield entry, None if not isinstance(entry, ast.Constant) else i
        case ast.Dict(values=entries):
            yield from ((entry, None) for entry in entries)
        case ast.DictComp(value=entry) | ast.ListComp(elt=entry) | ast.GeneratorExp(elt=entry):
            yield entry, None
        case ast.Call(func=ast.Attribute(attr="values" | "to" | "cuda" | "copy", value=inner)):
            yield from elements(inner, look, depth + 1)
        case ast.Call() if name_of(table.func).rpartition(".")[2] in _TABLES:
            yield from ((k.value, None) for k in table.keywords if k.arg and name_of(table.func) == "dict")
            for given in table.args[:1]:
                yield from elements(given, look, depth + 1)
        case ast.BinOp(op=ast.Add()):
            yield from elements(table.left, look, depth + 1)
            yield from elements(table.right, look, depth + 1)
        case ast.Name() | ast.Attribute() | ast.Subscript() if path_of(table):
            for value, part in look(table):
                if value is not table and part is None:
                    yield from elements(value, look, depth + 1)


def _each(over: ast.expr, place: tuple[int, ...], look: Look, depth: int) -> Iterator[Bound]:
    called = name_of(over.func) if isinstance(over, ast.Call) else ""
    method = over.func.attr if isinstance(over, ast.Call) and isinstance(over.func, ast.Attribute) else ""
    if isinstance(over, ast.Call) and called == "enumerate" and over.args and place[:1] == (1,):
        yield from _each(over.args[0], place[1:], look, depth + 1)
    elif isinstance(over, ast.Call) and called == "zip" and place and place[0] < len(over.args):
        yield from _each(over.args[place[0]], place[1:], look, depth + 1)
    elif (
        isinstance(over, ast.Call) and method == "items" and place[:1] == (1,) and isinstance(over.func, ast.Attribute)
    ):
        yield from _each(over.func.value, place[1:], look, depth + 1)
    elif not place:
        yield from elements(over, look)
    else:
        for entry, _ in elements(over, look):
            whole = entry
            for index in place:
                whole = whole.elts[index] if _has(whole, index) else ast.Constant(value=None)  # type: ignore[attr-defined]
            if not isinstance(whole, ast.Constant):
                yield whole, None


def _has(node: ast.expr, index: int) -> bool:
    return isinstance(node, ast.Tuple | ast.List) and index < len(node.elts)


def _place(target: ast.expr, name: str) -> tuple[int, ...] | None:
    """Where in a target a name stands: (1, 0) in `i, (x, y)` for x."""
    if isinstance(target, ast.Tuple | ast.List):
        for i, part in enumerate(target.elts):
            inner = _place(part, name)
            if inner is not None:
                return (i, *inner)
    return () if isinstance(target, ast.Name) and target.id == name else None


def _is_in(script: Script, node: ast.AST, over: ast.expr) -> bool:
    place: ast.AST | None = node
    while place is not None and not isinstance(place, ast.stmt):
        if place is over:
            return True
        place = script.parents.get(place)
    return False


def sources(
    script: Script, node: ast.expr, part: int | None = None, *, enter: bool = True, depth: int = 0
) -> list[Bound]:
    """Every expression that may be the origin; the expression itself where nothing more is known."""
    key = ("sources", node, part, enter)
    if key not in script.memo:
        script.memo[key] = [(node, part)]  # why: what leads back to itself says nothing
        found = _look(script, node, part, enter, depth) if depth < _DEEPEST else []
        script.memo[key] = list(dict.fromkeys(found)) or [(node, part)]
    result: list[Bound] = script.memo[key]
    return result


def named_sources(script: Script, name: str, at: ast.AST, *, enter: bool = True) -> list[Bound]:
    """The same for a name at a place; empty when the file does not tell."""
    found: list[Bound] = []
    bound = script.bound(name, at)
    if not bound and name.isidentifier():
        bound = loop_values(script, name, at, lambda e: sources(script, e, enter=enter)) or []
    for value, part in bound:
        found += sources(script, value, part, enter=enter)
    return list(dict.fromkeys(found))


def without_wrappers(script: Script, call: ast.Call, part: int | None = None) -> ast.expr | None:
    """`net` of `net.to(device)`, of `DDP(net)` and of `accelerator.prepare(net)`."""
    leaf = last(script.full(call.func)) if name_of(call.func) else getattr(call.func, "attr", "")
    if isinstance(call.func, ast.Attribute) and leaf in KEEPS and not script.full(call.func).startswith("torch."):
        return call.func.value
    if leaf in _HANDS_BACK and isinstance(call.func, ast.Attribute) and call.args:
        if part is not None:
            return call.args[part] if part < len(call.args) else None
        return call.args[0] if len(call.args) == 1 else None
    return call.args[0] if leaf in _WRAPS and call.args and part is None else None


def _look(script: Script, node: ast.expr, part: int | None, enter: bool, depth: int) -> list[Bound]:
    def follow(inner: ast.expr, which: int | None = part) -> list[Bound]:
        return sources(script, inner, which, enter=enter, depth=depth + 1)

    match node:
        case ast.NamedExpr() | ast.Await():
            return follow(node.value)
        case ast.IfExp():
            return [*follow(node.body), *follow(node.orelse)]
        case ast.BoolOp(op=ast.Or()):
            return [source for value in node.values for source in follow(value)]
        case ast.Tuple(elts=parts) | ast.List(elts=parts) if part is not None:
            return follow(parts[part], None) if part < len(parts) else []
        case ast.ListComp(elt=entry) | ast.GeneratorExp(elt=entry) if part is not None:
            return [(entry, part)]
        case ast.Name() | ast.Attribute() | ast.Subscript():
            return _of_path(script, node, part, enter, depth)
        case ast.Call():
            inner = without_wrappers(script, node, part)
            if inner is not None:
                return follow(inner, None)
            if isinstance(made := _lambda_of(script, node), ast.Lambda):
                return follow(made.body) if enter else []
            maker = maker_of(script, node)
            if maker is not None and (enter or len(script.calls.get(maker.name, ())) == 1):
                returns = [n for n in ast.walk(maker) if isinstance(n, ast.Return) and n.value is not None]
                mine = [n.value for n in returns if script.scope_of(n) is maker]
                return [source for value in mine if value is not None for source in follow(value)]
    return []


def _of_path(script: Script, node: ast.expr, part: int | None, enter: bool, depth: int) -> list[Bound]:
    path, found = path_of(node), list[Bound]()
    bound = script.bound(path, node) if path else []
    if not bound and isinstance(node, ast.Name):
        bound = loop_values(script, node.id, node, lambda e: sources(script, e, enter=enter, depth=depth + 1)) or []
    if not bound and isinstance(node, ast.Subscript) and not path and enter:
        bound = list(elements(node.value, lambda e: sources(script, e, enter=enter, depth=depth + 1)))
    for value, own in bound:
        if value is not node:
            found += sources(script, value, own if own is not None else part, enter=enter, depth=depth + 1)
    return found


def _lambda_of(script: Script, call: ast.Call) -> ast.expr | None:
    """`make = lambda m: ...`, called."""
    values = script.values(name_of(call.func), call) if name_of(call.func) else []
    return values[0] if len(values) == 1 else None


def maker_of(script: Script, call: ast.Call) -> Function | None:
    """The function of this file that a call by its plain name, on `self` or on a class, runs."""
    name = name_of(call.func)
    owner, _, leaf = script.linked.aliases.get(name, name).rpartition(".")
    functions = script.functions.get(leaf, [])
    if not owner:
        plain = [f for f in functions if script.class_of(f) is None]
        return plain[0] if len(plain) == 1 else None
    holder = script.class_of(call) if owner in ("self", "cls") else script.classes.get(owner)
    mine = [f for f in functions if holder is not None and script.parents.get(f) is holder]
    return mine[0] if len(mine) == 1 else None
