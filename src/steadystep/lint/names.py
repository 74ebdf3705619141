"""Names in a syntax tree: as written, as torch calls them, and what statements and calls bind to them."""

import ast
import re
import warnings
from collections.abc import Iterator, Mapping

from steadystep.errors import ConfigError

_OPTIMIZER = re.compile(r"optim|(^|_)opt(_|\d|$)|^opt[a-z]?$", re.I)
_SCHEDULER = re.compile(r"sched", re.I)
_SCALER = re.compile(r"scaler", re.I)
_MODEL = re.compile(
    r"(^|_)(model|net|network|module|classifier|encoder|decoder|generator|discriminator|critic|actor|agent|policy|"
    r"student|teacher|backbone|unet|resnet|lm|gpt|bert|vit|vae|rnn|lstm|gru|cell|forecaster|detector|gen|disc|tower|"
    r"trunk|projector|predictor|extractor|regressor|denoiser|transformer|mlp|cnn|gnn|gcn|gat)s?(_|\d|$)"
    r"|(model|net)$|^net|^q_?\d?$",
    re.I,
)
_NO_MODEL = re.compile(
    r"(tokeni[sz]er|processor|collat(e|or)(_fn)?|config|cfg|loader|dataset|score|metric|accuracy)s?$|_to_(device|cpu|gpu|cuda|disk)$"
    r"|^_*(get|make|build|create|load|save|move|freeze|unfreeze|prepare|wrap|unwrap|register|export|download|configure"
    r"|instantiate|compute|calc|calculate)_",
    re.I,
)
"""What is done with a network, or stands next to it."""
_LOSS = re.compile(r"loss|(^|_)(cost|objective|err|error)(_|\d|$)|^err|^(l|nll|ce|bce|mse|l_?[dgqvac]|lpi)$", re.I)
KEEPS = frozenset(
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
Function = ast.FunctionDef | ast.AsyncFunctionDef
Bound = tuple[ast.expr, int | None]
"""A value, and which part of it is meant; None for the whole."""


def name_of(node: ast.AST | None) -> str:
    """`a.b.c` for a chain of names, else an empty string."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


def path_of(node: ast.AST | None) -> str:
    """Like `name_of`, but with constant keys: `self.opts['disc']` is a name too."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        base, key = path_of(node.value), node.slice.value
        return f"{base}[{key!r}]" if base and isinstance(key, str | int) else ""
    if isinstance(node, ast.Attribute):
        base = path_of(node.value)
        return f"{base}.{node.attr}" if base else ""
    return name_of(node)


def owner_of(node: ast.AST | None) -> str:
    """Like `path_of`, but with names as keys too: `opts[k]`."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name):
        base = path_of(node.value)
        return f"{base}[{node.slice.id}]" if base else ""
    if isinstance(node, ast.Attribute):
        base = owner_of(node.value)
        return f"{base}.{node.attr}" if base else ""
    return path_of(node)


def chained(node: ast.AST) -> ast.AST:
    """`net` of `net.to(device).train()`: what a chain of methods that give the network back begins with."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in KEEPS:
        node = node.func.value
    return node


def last(name: str) -> str:
    """`c` of `a.b.c`."""
    return name.rpartition(".")[2]


def imports_of(tree: ast.Module) -> dict[str, str]:
    """What each imported name stands for, wherever in the file it is imported."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module or ''}.{alias.name}".lstrip(".")
    return found


def full_name(node: ast.AST | None, imports: Mapping[str, str]) -> str:
    """The name with its import written out."""
    name = name_of(node)
    head, dot, rest = name.partition(".")
    return imports.get(head, head) + dot + rest


def looks_like_optimizer(name: str) -> bool:
    """By its name only."""
    leaf = last(name)
    return bool(_OPTIMIZER.search(leaf)) and not _SCHEDULER.search(leaf) and "option" not in leaf.lower()


def looks_like_scheduler(name: str) -> bool:
    """By its name only."""
    return bool(_SCHEDULER.search(last(name)))


def looks_like_scaler(name: str) -> bool:
    """By its name only."""
    return bool(_SCALER.search(last(name)))


def looks_like_model(name: str) -> bool:
    """By its name only."""
    return bool(_MODEL.search(last(name))) and not _NO_MODEL.search(last(name))


def looks_like_loss(name: str) -> bool:
    """By its name only."""
    return bool(_LOSS.search(last(name)))


def argument(call: ast.Call, position: int, *keywords: str) -> ast.expr | None:
    """An argument by position or by any of its names."""
    for keyword in call.keywords:
        if keyword.arg in keywords:
            return keyword.value
    if position < len(call.args) and not any(isinstance(a, ast.Starred) for a in call.args[: position + 1]):
        return call.args[position]
    return None


def calls_in(node: ast.AST) -> Iterator[ast.Call]:
    """Calls in the order they are made; those inside a lambda or a nested function are not made here."""
    if isinstance(node, ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return
    for child in ast.iter_child_nodes(node):
        yield from calls_in(child)
    if isinstance(node, ast.Call):
        yield node


_PYTHON_2 = re.compile(
    r"^Missing parentheses in call to '(print|exec)'|^multiple exception types must be|^leading zeros"
)


_LONG_TABLE, _KEPT_ROWS = 1000, 50


def _without_long_tables(tree: ast.Module) -> ast.Module:
    """The tree with the first rows of every long table of plain data: what is read of data, the first rows say."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.List | ast.Tuple | ast.Set) and len(node.elts) > _LONG_TABLE:
            plain = [_is_data(e) for e in node.elts]
            node.elts = [e for i, e in enumerate(node.elts) if i < _KEPT_ROWS or not plain[i]]
        elif isinstance(node, ast.Dict) and len(node.keys) > _LONG_TABLE:
            rows = list(zip(node.keys, node.values, strict=True))
            kept = [(k, v) for i, (k, v) in enumerate(rows) if i < _KEPT_ROWS or not (_is_data(k) and _is_data(v))]
            node.keys, node.values = [k for k, _ in kept], [v for _, v in kept]
        waiting.extend(ast.iter_child_nodes(node))
    return tree


def _is_data(node: ast.expr | None) -> bool:
    """A number, a text, or a table of such."""
    if isinstance(node, ast.Constant):
        return True
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.operand, ast.Constant)
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return all(map(_is_data, node.elts))
    return isinstance(node, ast.Dict) and all(map(_is_data, (*node.keys, *node.values)))


def parse_script(text: str, path: str) -> ast.Module:
    """The tree, or a message with the line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an odd escape in somebody's string is not our business
            return _without_long_tables(ast.parse(text))
    except SyntaxError as error:
        old = "; Python 2 is not supported" if _PYTHON_2.search(error.msg) else ""
        raise ConfigError(f"{path}:{error.lineno or 1}: not valid Python ({error.msg}){old}") from None
    except (RecursionError, MemoryError):
        raise ConfigError(f"{path}: cannot be parsed: nested too deeply") from None
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
