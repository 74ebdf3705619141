"""What an expression was put through last: softmax, log-softmax or sigmoid, through names, networks and callers."""

import ast
from typing import Literal

from steadystep.lint.names import last, name_of, parameters, passed, path_of
from steadystep.lint.networks import is_module_class
from steadystep.lint.script import Function, Script
from steadystep.lint.sources import named_sources, sources
from steadystep.lint.targets import method_of, sites_of, target_of

Ending = Literal["softmax", "log_softmax", "sigmoid"]
Found = tuple[Ending, ast.AST]
FUNCTIONS: dict[str, Ending] = {"softmax": "softmax", "log_softmax": "log_softmax", "sigmoid": "sigmoid"}
LAYERS: dict[str, Ending] = {"Softmax": "softmax", "LogSoftmax": "log_softmax", "Sigmoid": "sigmoid"}
_SHAPING = frozenset(
    [
        *("view", "reshape", "flatten", "squeeze", "transpose", "permute", "float", "contiguous", "unsqueeze", "to"),
        *("clamp", "clamp_min", "clip", "index_select", "t", "cuda", "cpu", "double", "type_as", "movedim", "swapaxes"),
        *("clone",),
    ]
)  # fmt: skip
_JOINS = ("cat", "stack", "concat", "concatenate", "vstack", "hstack")


def tail_of(script: Script, made: ast.Call) -> ast.expr | None:
    """The last layer: of the arguments, of a list that is unpacked, of an `OrderedDict`."""
    tail = made.args[-1] if made.args else None
    if isinstance(tail, ast.Starred) and isinstance(tail.value, ast.Name):
        return _last_put(script, tail.value.id, made)
    if isinstance(tail, ast.Call) and last(name_of(tail.func)) == "OrderedDict" and tail.args:
        listed = tail.args[0].elts if isinstance(tail.args[0], ast.List) else []
        return (
            listed[-1].elts[1] if listed and isinstance(listed[-1], ast.Tuple) and len(listed[-1].elts) == 2 else None
        )
    return tail


def _last_put(script: Script, name: str, made: ast.Call) -> ast.expr | None:
    """What was put last at the end of a list, in the same block: `append`, `+= [...]`, `[-1] = ...`."""
    block = getattr(script.parents.get(script.stmt_of(made)), "body", [])
    found: ast.expr | None = None
    for stmt in (s for s in block if s.lineno <= made.lineno):
        match stmt:
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr="append", value=owner), args=[given])):
                found = given if name_of(owner) == name else found
            case ast.AugAssign(op=ast.Add(), value=ast.List(elts=[*_, given])) if name_of(stmt.target) == name:
                found = given
            case ast.Assign(targets=[ast.Subscript(value=owner, slice=place)], value=given):
                end = isinstance(place, ast.UnaryOp) and getattr(place.operand, "value", None) == 1
                found = given if name_of(owner) == name and end else found
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.List(elts=[*_, given])) if target == name:
                found = given
            case ast.For() | ast.While() if any(name_of(n) == name for n in ast.walk(stmt)):
                found = None
    return found


def ending_of(
    script: Script, node: ast.expr, at: ast.AST, depth: int = 0, part: int | str | None = None
) -> Found | None:
    """What an expression, or one part of a tuple or a table, was put through last."""
    if depth > 7:
        return None
    if isinstance(node, ast.NamedExpr):
        node = node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and _is_tiny(node.right):
        node = node.left  # probabilities with a little added are probabilities
    if isinstance(node, ast.Name):
        return _of_name(script, node, at, depth, part)
    if part is not None and isinstance(node, ast.Tuple | ast.List | ast.Dict):
        chosen = _chosen(node, part)
        return ending_of(script, chosen, at, depth + 1) if chosen is not None else None
    if isinstance(node, ast.Subscript):
        key = getattr(node.slice, "value", None) if isinstance(node.slice, ast.Constant) else None
        taken = ending_of(script, node.value, at, depth + 1, key) if isinstance(key, int | str) else None
        return taken or (ending_of(script, node.value, at, depth + 1) if not isinstance(key, str) else None)
    return _of_call(script, node, at, depth, part) if isinstance(node, ast.Call) else None


def _of_call(script: Script, node: ast.Call, at: ast.AST, depth: int, part: int | str | None) -> Found | None:
    full = script.full(node.func)
    method = node.func.attr if isinstance(node.func, ast.Attribute) else last(full)
    if method in FUNCTIONS and not full.startswith("self.") and part is None:
        return FUNCTIONS[method], node
    if isinstance(node.func, ast.Call) and last(script.full(node.func.func)) in LAYERS and part is None:
        return LAYERS[last(script.full(node.func.func))], node
    if isinstance(node.func, ast.Attribute) and method in _SHAPING:
        of = node.args[0] if full.startswith("torch.") and node.args else node.func.value
        return ending_of(script, of, at, depth + 1)
    if method in _JOINS and node.args and part is None:
        return _of_all(script, node.args[0], at, depth)
    name = path_of(node.func)
    if name in ("self", "self.forward"):
        return _of_self(script, node, depth, part)
    called = {
        FUNCTIONS.get(last(script.full(v))) for v, _ in sources(script, node.func) if script.full(v)[:6] == "torch."
    }
    if len(called) == 1 and None not in called and part is None:
        return next(ending for ending in called if ending is not None), node
    function = target_of(node, script)
    if function is not None and function.name not in ("__call__", "forward"):
        return _of_returns(script, function, depth, part)
    return _of_value(script, name.removesuffix(".forward"), node, depth, part)


def _is_tiny(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, float) and 0 < node.value < 1e-3


def _of_all(script: Script, parts: ast.expr, at: ast.AST, depth: int) -> Found | None:
    """What all the parts of a list were put through."""
    listed = parts.elts if isinstance(parts, ast.List | ast.Tuple) else []
    listed = [parts.elt] if isinstance(parts, ast.ListComp) else listed
    found = [ending_of(script, part, at, depth + 1) for part in listed]
    return found[0] if found and all(f is not None and found[0] and f[0] == found[0][0] for f in found) else None


def _chosen(node: ast.Tuple | ast.List | ast.Dict, part: int | str) -> ast.expr | None:
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return next((v for k, v in pairs if isinstance(k, ast.Constant) and k.value == part), None)
    inside = isinstance(part, int) and -len(node.elts) <= part < len(node.elts)
    return node.elts[int(part)] if inside else None


def _of_name(script: Script, node: ast.Name, at: ast.AST, depth: int, part: int | str | None) -> Found | None:
    found = script.reaching(node.id, at)
    if found is None:
        return _given_by_callers(script, node.id, at, depth) if part is None else None
    stmt, value = found
    if _conditional(script, stmt, at):
        return None
    if _single(stmt, node.id):
        return ending_of(script, value, stmt, depth + 1, part)
    target = stmt.targets[0] if isinstance(stmt, ast.Assign) else None
    names = [name_of(t) for t in target.elts] if isinstance(target, ast.Tuple) else []
    if part is not None or node.id not in names or value is not getattr(stmt, "value", None):
        return None
    return ending_of(script, value, stmt, depth + 1, names.index(node.id))


def _given_by_callers(script: Script, name: str, at: ast.AST, depth: int) -> Found | None:
    """What every caller in the file puts a parameter through."""
    function = script.scope_of(at)
    if function is None or name not in parameters(function):
        return None
    names = parameters(function)
    position = names.index(name) - (1 if names[:1] in (["self"], ["cls"]) else 0)
    sites = [c for c in sites_of(function, script) if script.scope_of(c) is not function]
    given = [(passed(c, position, name), c) for c in sites[:6]]
    found = [ending_of(script, value, call, depth + 2) if value is not None else None for value, call in given]
    if not found or any(f is None for f in found) or len({f[0] for f in found if f}) != 1:
        return None
    return found[0]


def _of_value(script: Script, name: str, at: ast.AST, depth: int, part: int | str | None) -> Found | None:
    """The ending of the network or the layer a name stands for."""
    found = named_sources(script, name, at, enter=False) if name else []
    if len(found) != 1 or not isinstance(found[0][0], ast.Call):
        return None
    return _of_made(script, found[0][0], at, depth, part)


def _of_made(script: Script, made: ast.Call, at: ast.AST, depth: int, part: int | str | None) -> Found | None:
    while (
        isinstance(made.func, ast.Attribute)
        and made.func.attr in ("to", "cuda", "train", "float")
        and isinstance(made.func.value, ast.Call)
    ):
        made = made.func.value
    leaf = last(script.full(made.func))
    if leaf in LAYERS and part is None:
        return LAYERS[leaf], at
    if leaf == "Sequential" and part is None:
        tail = tail_of(script, made)
        ending = LAYERS.get(last(script.full(tail.func))) if isinstance(tail, ast.Call) else None
        return (ending, tail) if ending and tail is not None else None
    if leaf in script.classes:
        return _of_forward(script, script.classes[leaf], depth, part)
    made_by = script.functions.get(leaf, ())
    returns = [n.value for f in made_by for n in ast.walk(f) if isinstance(n, ast.Return)]
    if len(made_by) == len(returns) == 1 and isinstance(returns[0], ast.Call) and "." not in name_of(made.func):
        return _of_made(script, returns[0], returns[0], depth + 1, part) if depth < 5 else None
    return None


def _of_self(script: Script, call: ast.Call, depth: int, part: int | str | None) -> Found | None:
    """`self(x)` in a network, unless a subclass in the file has another forward."""
    owner = script.class_of(call)
    if owner is None or not is_module_class(owner, script) or _defines(owner, "__call__"):
        return None
    for other in script.classes.values():
        if owner.name in {last(name_of(base)) for base in other.bases} and _defines(other, "forward"):
            return None
    return _of_forward(script, owner, depth, part)


def _defines(owner: ast.ClassDef, name: str) -> bool:
    return any(isinstance(m, ast.FunctionDef) and m.name == name for m in owner.body)


def _of_forward(script: Script, owner: ast.ClassDef, depth: int, part: int | str | None) -> Found | None:
    """What every return of `forward` ends in; two kinds of returns mean nothing is known."""
    forward = method_of(owner, "forward", script)
    return _of_returns(script, forward, depth, part) if forward is not None else None


def _of_returns(script: Script, function: Function, depth: int, part: int | str | None) -> Found | None:
    returns = [n for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None]
    found = [ending_of(script, r.value, r, depth + 1, part) for r in returns if r.value is not None]
    if not found or any(f is None for f in found) or len({f[0] for f in found if f}) != 1:
        return None
    return found[0]


def _single(stmt: ast.stmt, name: str) -> bool:
    return isinstance(stmt, ast.Assign) and any(name_of(target) == name for target in stmt.targets)


def _conditional(script: Script, stmt: ast.stmt, at: ast.AST) -> bool:
    """An assignment in an arm that the place itself is not in."""
    around = set(script.ancestors(at))
    return any(isinstance(a, ast.If | ast.Try) and a not in around for a in script.ancestors(stmt))
