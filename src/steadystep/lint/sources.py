"""What an expression comes from: names followed, wrappers taken off, functions of the file that make it gone into."""

import ast

from steadystep.lint.elements import elements, loop_values
from steadystep.lint.names import last, name_of, path_of
from steadystep.lint.script import Bound, Function, Script

_KEEPS = frozenset(
    [
        "to",
        "cuda",
        "cpu",
        "train",
        "eval",
        "float",
        "half",
        "double",
        "bfloat16",
        "requires_grad_",
        "share_memory",
        "xpu",
    ]
)
"""Methods that give back what they were called on."""

_WRAPS = frozenset(
    ["compile", "DataParallel", "DistributedDataParallel", "DDP", "FSDP", "convert_sync_batchnorm", "script"]
)
_HANDS_BACK = frozenset(["prepare", "setup", "setup_module", "prepare_model", "setup_optimizers", "prepare_optimizer"])
"""Of a framework: what goes in comes out."""

_DEEPEST = 10


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


def unwrapped(script: Script, call: ast.Call, part: int | None = None) -> ast.expr | None:
    """`net` of `net.to(device)`, of `DDP(net)` and of `accelerator.prepare(net)`."""
    leaf = last(script.full(call.func)) if name_of(call.func) else getattr(call.func, "attr", "")
    if isinstance(call.func, ast.Attribute) and leaf in _KEEPS and not script.full(call.func).startswith("torch."):
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
            inner = unwrapped(script, node, part)
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
    owner, _, leaf = name_of(call.func).rpartition(".")
    functions = script.functions.get(leaf, [])
    if not owner:
        plain = [f for f in functions if script.class_of(f) is None]
        return plain[0] if len(plain) == 1 else None
    holder = script.class_of(call) if owner in ("self", "cls") else script.classes.get(owner)
    mine = [f for f in functions if holder is not None and script.parents.get(f) is holder]
    return mine[0] if len(mine) == 1 else None
