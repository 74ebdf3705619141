"""Which breakages are made out of a source file.

Left out is what no test is meant to notice: annotations, decorators, texts, `__repr__`, logging, assertions, blocks
for the type checker; and what is certainly the same program, such as swapping the two arguments of `max`.
"""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

from .mutant import Function, Mutant, Positions

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}
TWINS = {"min": "max", "max": "min", "any": "all", "all": "any"}
SYMMETRIC = {"min", "max", "minimum", "maximum", "isclose", "allclose", "equal", "hypot", "gcd", "zip", "isinstance"}
SYMMETRIC |= {"getattr", "hasattr", "promote_types"}
SAID = {
    "warn",
    "warning",
    "log",
    "debug",
    "info",
    "exception",
    "print",
    "notice",
    "cast",
    "TypeVar",
    "ParamSpec",
    "field",
}
TEXTS = {"__repr__", "__str__", "__rich__"}
TEXT = ast.JoinedStr | ast.List | ast.Tuple
Change = tuple[str, str]  # kind, and the text put in place of the node


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spot:
    """A place where something can be broken."""

    node: ast.expr | ast.stmt
    changes: tuple[Change, ...]


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """All of one file, in the order of the text."""
    positions = Positions(source)
    found: dict[tuple[int, int, str], Mutant] = {}
    for spot in _spots(ast.parse(source).body):
        start, end = positions.span(spot.node)
        old = source[start:end].decode()
        for kind, put in spot.changes:
            mutant = Mutant(path=path, line=spot.node.lineno, start=start, end=end, old=old, put=put, kind=kind)
            found.setdefault((start, end, put), mutant)
    return sorted(found.values(), key=lambda m: (m.start, m.end, m.put))


def _spots(body: list[ast.stmt], *, building: bool = False) -> Iterator[_Spot]:
    for statement in body:
        if _untested(statement):
            continue
        # why: an attribute that is never set is noticed by whoever reads it first, and says nothing about the tests
        if not (building and isinstance(statement, ast.Assign)) and (changes := tuple(_statement_changes(statement))):
            yield _Spot(node=statement, changes=changes)
        for expression in _expressions(statement):
            yield from _expression_spots(expression)
        building_below = statement.name == "__init__" if isinstance(statement, Function) else building
        for block in ("body", "orelse", "finalbody"):
            yield from _spots(getattr(statement, block, []), building=building_below)
        for part in [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
            yield from _spots(part.body, building=building_below)


def _untested(statement: ast.stmt) -> bool:
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Assert() | ast.Raise() | ast.Pass() | ast.Global() | ast.Nonlocal():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call() as call):
            return _name(call.func) in SAID
        case ast.Assign(targets=[ast.Name(id=("__all__" | "__slots__"))]):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            return True
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            marks = {_name(mark) for mark in statement.decorator_list}
            return statement.name in TEXTS or bool(marks & {"overload", "abstractmethod"})
        case ast.ClassDef():
            return any(_name(base) == "Protocol" for base in statement.bases)
    return False


def _statement_changes(statement: ast.stmt) -> Iterator[Change]:
    match statement:
        case ast.Return(value=ast.expr() as value):
            if not isinstance(value, ast.Constant):
                yield "return", "return None"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Break() | ast.Continue() | ast.Delete():
            yield "delete", "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield "delete", "pass"


def _expressions(statement: ast.stmt) -> list[ast.expr]:
    """What a statement computes: no annotation, no decorator, no target."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return [*statement.args.defaults, *(value for value in statement.args.kw_defaults if value is not None)]
        case ast.Return() | ast.Assign() | ast.AnnAssign() | ast.AugAssign() | ast.Expr():
            return [statement.value] if statement.value is not None else []
        case ast.If() | ast.While():
            return [statement.test]
        case ast.For() | ast.AsyncFor():
            return [statement.iter]
        case ast.With() | ast.AsyncWith():
            return [item.context_expr for item in statement.items]
        case ast.Match():
            return [statement.subject, *(case.guard for case in statement.cases if case.guard is not None)]
    return []


def _expression_spots(node: ast.expr) -> Iterator[_Spot]:
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and _name(node.func) in SAID):
        return
    if changes := tuple(_expression_changes(node)):
        yield _Spot(node=node, changes=changes)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield from _expression_spots(child)
        elif isinstance(child, ast.keyword):
            yield from _expression_spots(child.value)
        elif isinstance(child, ast.comprehension):
            for part in (child.iter, *child.ifs):
                yield from _expression_spots(part)


def _expression_changes(node: ast.expr) -> Iterator[Change]:
    match node:
        case ast.Compare():
            yield from _comparisons(node)
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "and/or", _text(node, op=other)
            for left_out in range(len(node.values)):
                rest = [value for at, value in enumerate(node.values) if at != left_out]
                yield "operand", _text(rest[0]) if len(rest) == 1 else _text(node, values=rest)
        case ast.UnaryOp(op=ast.Not()):
            yield "not", _text(node.operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield "sign", _text(operand)
        case ast.IfExp():
            yield "branch", _text(node, body=node.orelse, orelse=node.body)
        case ast.BinOp():
            texts = any(isinstance(side, TEXT) or _is_string(side) for side in (node.left, node.right))
            if (opposite := ARITHMETIC.get(type(node.op))) is not None and not texts:
                yield "arithmetic", _text(node, op=opposite())
        case ast.Constant():
            yield from _constants(node.value)
        case ast.Call():
            yield from _calls(node)


def _comparisons(node: ast.Compare) -> Iterator[Change]:
    for at, operator in enumerate(node.ops):
        for other in COMPARISONS[type(operator)]:
            yield "comparison", _text(node, ops=[other() if n == at else op for n, op in enumerate(node.ops)])


def _constants(value: object) -> Iterator[Change]:
    match value:
        case bool():
            yield "constant", repr(not value)
        case int():
            yield "constant", repr(value + 1)
            if value > 2:
                yield "constant", repr(value * 2)
        case float():
            yield "constant", repr(value * 2 if value else 1.0)
            if value:
                yield "constant", repr(value / 2)


def _calls(node: ast.Call) -> Iterator[Change]:
    name = _name(node.func)
    if isinstance(node.func, ast.Name) and name in TWINS:
        yield "twin", _text(node, func=ast.Name(id=TWINS[name]))
    two = node.args[:2]
    if len(two) == 2 and name not in SYMMETRIC and not any(isinstance(arg, ast.Starred) for arg in two):
        yield "swap", _text(node, args=[two[1], two[0], *node.args[2:]])


def _text(node: ast.expr, **changes: object) -> str:
    other = copy.copy(node)
    for name, value in changes.items():
        setattr(other, name, value)
    written = ast.unparse(other)
    return written if isinstance(other, ast.Call | ast.Name | ast.Constant | ast.Attribute) else f"({written})"


def _name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=inner) | ast.Subscript(value=inner):
            return _name(inner)
    return ""


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
