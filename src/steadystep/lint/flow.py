"""Questions with one answer, and short loops over optimizers, networks or phases that are taken one by one."""

import ast
from collections.abc import Mapping

from steadystep.lint.names import name_of, path_of
from steadystep.lint.script import Script

UNKNOWN = object()
"""Not told by the file."""

_DEEPEST = 4
Binding = dict[str, str | tuple[object]]
"""What each loop variable is in one pass: a path, or a constant in a tuple."""
_MOST = 6
_ABOUT = ("step", "zero_grad", "update", "unscale_", "train", "eval", "parameters", "backward", "zero_")


def answer(test: ast.expr, known: Mapping[str, object], script: Script, depth: int = 0) -> object:
    """What an expression is, with what is known of the names in it; `UNKNOWN` else."""
    if depth > _DEEPEST:
        return UNKNOWN
    match test:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return known[name] if name in known else _local(name, test, known, script, depth)
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            found = answer(inner, known, script, depth + 1)
            return UNKNOWN if found is UNKNOWN else not found
        case ast.BoolOp():
            return _joined(test, known, script, depth)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _compared(op, answer(left, known, script, depth + 1), right, known, script, depth)
        case ast.Call(func=ast.Name(id="bool"), args=[inner]):
            found = answer(inner, known, script, depth + 1)
            return UNKNOWN if found is UNKNOWN else bool(found)
    return UNKNOWN


def _local(name: str, at: ast.expr, known: Mapping[str, object], script: Script, depth: int) -> object:
    """`training = optimizer is not None`, assigned once in the same function."""
    scope = script.scope_of(at)
    assigned = script.assigned.get((scope, name), ()) if scope is not None else ()
    if len(assigned) != 1 or not isinstance(assigned[0][1], ast.Compare | ast.UnaryOp | ast.BoolOp | ast.Call):
        return UNKNOWN
    if isinstance(assigned[0][1], ast.Call) and name_of(assigned[0][1].func) != "bool":
        return UNKNOWN
    return answer(assigned[0][1], known, script, depth + 1)


def _joined(test: ast.BoolOp, known: Mapping[str, object], script: Script, depth: int) -> object:
    found = [answer(value, known, script, depth + 1) for value in test.values]
    decides = isinstance(test.op, ast.Or)
    for value in found:
        if value is not UNKNOWN and bool(value) is decides:
            return decides
    return UNKNOWN if any(value is UNKNOWN for value in found) else not decides


def _compared(
    op: ast.cmpop, left: object, right: ast.expr, known: Mapping[str, object], script: Script, depth: int
) -> object:
    if isinstance(op, ast.In | ast.NotIn):
        parts = right.elts if isinstance(right, ast.Tuple | ast.List | ast.Set) else []
        values = [answer(part, known, script, depth + 1) for part in parts]
        if left is UNKNOWN or not values or UNKNOWN in values:
            return UNKNOWN
        return (left in values) == isinstance(op, ast.In)
    other = answer(right, known, script, depth + 1)
    if left is UNKNOWN or other is UNKNOWN:
        return UNKNOWN
    if isinstance(op, ast.Eq | ast.NotEq | ast.Is | ast.IsNot):
        same = left is other if left is None or other is None else left == other
        return same == isinstance(op, ast.Eq | ast.Is)
    return UNKNOWN


def written_out(target: ast.expr, over: ast.expr, script: Script) -> list[Binding] | None:
    """A binding for each pass; None when the file does not tell, or when it is a repetition after all."""
    passes = _passes(over, script, 0)
    if not passes or len(passes) > _MOST:
        return None
    bound = [_bind(target, one) for one in passes]
    kinds = {type(v[0]) for b in bound if b for v in b.values() if isinstance(v, tuple)}
    if any(b is None for b in bound) or not any(bound) or kinds - {str, bool, type(None)}:
        return None
    return [b for b in bound if b is not None]


def goes_over(target: ast.expr, over: ast.expr, body: list[ast.AST]) -> Binding | None:
    """`for o in self.optimizers: o.step()`: what is stepped or cleared is the loop variable, so it is no repetition."""
    names = {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
    heads = {
        name_of(n.func.value).partition(".")[0]
        for part in body
        for n in ast.walk(part)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in ("step", "zero_grad")
    }
    if not names & heads:
        return None
    while isinstance(over, ast.Call):
        if name_of(over.func) in ("zip", "enumerate", "list", "reversed", "tuple") and over.args:
            over = over.args[0]
        elif isinstance(over.func, ast.Attribute) and over.func.attr in ("values", "items"):
            over = over.func.value
        else:
            break
    path = path_of(over)
    return {name: f"{path}[*].{name}" for name in names} if path else {}


def is_about_networks(body: list[ast.AST]) -> bool:
    """Something is stepped, cleared, switched or clipped in it."""
    return any(isinstance(n, ast.Attribute) and n.attr in _ABOUT for part in body for n in ast.walk(part))


def _bind(target: ast.expr, given: ast.expr | str) -> Binding | None:
    if isinstance(target, ast.Name):
        if isinstance(given, str):
            return {target.id: given}
        if isinstance(given, ast.Constant):
            return {target.id: (given.value,)}
        return {target.id: path_of(given)} if path_of(given) else {}
    if isinstance(target, ast.Tuple | ast.List) and isinstance(given, ast.Tuple | ast.List):
        if len(target.elts) != len(given.elts):
            return None
        found: Binding = {}
        for part, value in zip(target.elts, given.elts, strict=True):
            inner = _bind(part, value)
            if inner is None:
                return None
            found |= inner
        return found
    return None


def _passes(over: ast.expr, script: Script, depth: int) -> list[ast.expr | str]:
    """What is met in each pass: an expression, or the path of an entry."""
    if depth > 3:
        return []
    match over:
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return [] if any(isinstance(p, ast.Starred) for p in parts) else list(parts)
        case ast.Dict(keys=keys):
            return [k for k in keys if k is not None] if all(k is not None for k in keys) else []
        case ast.Call(func=ast.Attribute(attr="items" | "values" as which, value=table)):
            return _entries(table, which, script)
        case ast.Call(func=ast.Name(id="zip"), args=[_, *_] as given):
            columns = [_passes(g, script, depth + 1) for g in given]
            if any(len(c) != len(columns[0]) for c in columns):
                return []
            return [_tuple([_expr(part) for part in row]) for row in zip(*columns, strict=True)]
        case ast.Call(func=ast.Name(id="enumerate"), args=[given, *_]):
            inner = _passes(given, script, depth + 1)
            return [_tuple([ast.Name(id="_", ctx=ast.Load()), _expr(part)]) for part in inner]
    path = path_of(over)
    values = {id(v): v for v in script.values(path, over)} if path else {}
    if len(values) != 1:
        return []
    value = next(iter(values.values()))
    if isinstance(value, ast.List | ast.Tuple) and not any(isinstance(e, ast.Starred) for e in value.elts):
        plain = [isinstance(e, ast.Constant | ast.Tuple) or bool(path_of(e)) for e in value.elts]
        return [e if plain[i] else f"{path}[{i}]" for i, e in enumerate(value.elts)]
    return _passes(value, script, depth + 1) if isinstance(value, ast.Dict) else []


def _entries(table: ast.expr, which: str, script: Script) -> list[ast.expr | str]:
    path = path_of(table)
    values = list({id(v): v for v in script.values(path, table)}.values()) if path else [table]
    written = values[0] if len(values) == 1 else None
    while isinstance(written, ast.Call):  # ModuleDict({...}).to(device)
        inner = written.func.value if isinstance(written.func, ast.Attribute) else None
        written = inner if isinstance(inner, ast.Call) else next(iter(written.args), None)
    if not isinstance(written, ast.Dict) or not all(isinstance(k, ast.Constant) for k in written.keys):
        return []
    found: list[ast.expr | str] = []
    for key, value in zip(written.keys, written.values, strict=True):
        assert isinstance(key, ast.Constant)
        entry: ast.expr | str = value if path_of(value) or not path else f"{path}[{key.value!r}]"
        found.append(_tuple([key, _expr(entry)]) if which == "items" else entry)
    return found


def _expr(part: ast.expr | str) -> ast.expr:
    return ast.parse(part, mode="eval").body if isinstance(part, str) else part


def _tuple(parts: list[ast.expr]) -> ast.expr:
    return ast.Tuple(elts=parts, ctx=ast.Load())
