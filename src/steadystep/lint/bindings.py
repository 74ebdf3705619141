"""What statements bind to names, and what calls bind to parameters."""

import ast
import warnings
from collections.abc import Iterator

from steadystep.errors import ConfigError
from steadystep.lint.names import path_of

Function = ast.FunctionDef | ast.AsyncFunctionDef

Bound = tuple[ast.expr, int | None]
"""A value, and which part of it is meant; None for the whole."""


def parse(text: str, path: str) -> ast.Module:
    """The tree, or a message with the line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an odd escape in somebody's string is not our business
            return ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno or 1}: not valid Python ({error.msg})") from None
    except (RecursionError, MemoryError):
        raise ConfigError(f"{path}: could not be read: too deeply nested") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid Python ({error})") from None


def bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr, int | None]]:
    """(name, value, which part of it) for what a statement assigns; several names share what cannot be taken apart."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _unpacked(target, node.value)
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        yield from _unpacked(node.target, node.value)
    elif isinstance(node, ast.With | ast.AsyncWith):
        for item in node.items:
            if item.optional_vars is not None:
                yield from _unpacked(item.optional_vars, item.context_expr)


def _unpacked(target: ast.expr, value: ast.expr, part: int | None = None) -> Iterator[tuple[str, ast.expr, int | None]]:
    if isinstance(target, ast.Tuple | ast.List):
        same = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
        for i, inner in enumerate(target.elts):
            own = value.elts[i] if same else value  # type: ignore[attr-defined]
            yield from _unpacked(inner, own, None if same else i)
    elif name := path_of(target):
        yield name, value, part


def parameters(function: Function) -> list[str]:
    """The names of a function's parameters, in order."""
    a = function.args
    return [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs)]


def default_of(function: Function, name: str) -> ast.expr | None:
    """The default of a parameter."""
    a = function.args
    plain = [*a.posonlyargs, *a.args]
    for parameter, default in zip(reversed(plain), reversed(a.defaults), strict=False):
        if parameter.arg == name:
            return default
    for parameter, keyword_default in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        if parameter.arg == name:
            return keyword_default
    return None


def passed(call: ast.Call, position: int, name: str) -> ast.expr | None:
    """What a call gives for a parameter."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if 0 <= position < len(call.args) and not any(isinstance(a, ast.Starred) for a in call.args[: position + 1]):
        return call.args[position]
    return None


def annotation_of(function: Function, name: str) -> ast.expr | None:
    """What a parameter is said to be."""
    a = function.args
    return next((p.annotation for p in (*a.posonlyargs, *a.args, *a.kwonlyargs) if p.arg == name), None)
