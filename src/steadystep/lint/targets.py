"""Which function of the same file a call runs."""

import ast

from steadystep.lint.names import annotation_of, last, name_of, path_of
from steadystep.lint.script import Function, Script
from steadystep.lint.sources import named_sources, sources

_ANYBODY = frozenset(
    [
        *("step", "update", "train", "eval", "forward", "backward", "zero_grad", "append", "add", "get", "items"),
        *("save", "load", "reset", "close", "write", "run", "fit", "state_dict", "load_state_dict", "parameters", "to"),
        *("values", "keys", "pop", "clear", "mean", "sum", "max", "min", "sample", "push", "size", "view", "apply"),
        *("scale", "unscale_", "item", "detach", "cpu", "cuda", "float", "half", "split", "join", "format", "read"),
        *("generate", "encode", "decode", "transform", "call", "clip", "start", "stop", "extend", "insert", "index"),
        *("count", "copy", "print", "log"),
    ]
)  # fmt: skip
"""Methods that many things have, so that the name alone says nothing."""


def target_of(call: ast.Call, script: Script) -> Function | None:
    """The function in this file that a call runs, when there is just one it can be."""
    key = ("target", call)
    if key not in script.memo:
        script.memo[key] = None
        script.memo[key] = _target(call, script)
    found: Function | None = script.memo[key]
    return found


def forward_of(call: ast.Call, script: Script) -> Function | None:
    """The forward of a network of this file that is called like a function."""
    name = path_of(call.func)
    owner = _class_of_value(name, call, script) if name and name != "self" else script.class_of(call) if name else None
    return method_of(owner, "forward", script)


def _target(call: ast.Call, script: Script) -> Function | None:
    if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call):
        return _of_result(call.func, call.func.value, script)
    name = script.linked.aliases.get(path_of(call.func), path_of(call.func))
    if not name:
        return None
    if "." not in name and "[" not in name:
        functions = [f for f in script.functions.get(name, ()) if script.class_of(f) is None]
        if len(functions) == 1:
            return functions[0]
        if functions:
            return _visible(functions, call, script)
        return method_of(_class_of_value(name, call, script), "__call__", script)
    owner, _, method = name.rpartition(".")
    if owner in ("self", "cls"):
        mine = script.class_of(call)
        own = method_of(mine, method, script)
        if own is None or _is_empty(own):
            below = [
                m for m in (method_of(c, method, script) for c in subclasses(script, mine)) if m not in (None, own)
            ]
            own = below[0] if len(set(below)) == 1 else own
        return own or method_of(_class_of_value(name, call, script), "__call__", script)
    if owner in script.classes:
        return method_of(script.classes[owner], method, script)
    holder = _class_of_value(owner, call, script)
    if holder is not None:
        return method_of(holder, method, script)
    return _only_one(method, owner, script)


def _of_result(func: ast.Attribute, made: ast.Call, script: Script) -> Function | None:
    """`Trainer(cfg).fit()` and `super().step()`."""
    if name_of(made.func) == "super":
        mine = script.class_of(func)
        bases = [script.classes.get(last(name_of(b))) for b in mine.bases] if mine is not None else []
        return next((m for m in (method_of(b, func.attr, script) for b in bases) if m is not None), None)
    classes = {
        last(name_of(v.func)) for v, _ in sources(script, made) if isinstance(v, ast.Call)
    } & script.classes.keys()
    return method_of(script.classes[classes.pop()], func.attr, script) if len(classes) == 1 else None


def subclasses(script: Script, owner: ast.ClassDef | None) -> list[ast.ClassDef]:
    """Classes of this file that come from one."""
    if owner is None:
        return []
    return [c for c in script.classes.values() if owner.name in {last(name_of(b)) for b in c.bases}]


def _visible(functions: list[Function], call: ast.Call, script: Script) -> Function | None:
    """Of several with one name: the one that is defined nearest around."""
    scope = script.scope_of(call)
    while True:
        here = [f for f in functions if script.scope_of(f) is scope]
        if here or scope is None:
            return here[0] if len(here) == 1 else None
        scope = script.scope_of(scope)


def _class_of_value(name: str, at: ast.AST, script: Script) -> ast.ClassDef | None:
    found = named_sources(script, name, at)
    made = {last(name_of(v.func)) for v, part in found if isinstance(v, ast.Call)} & script.classes.keys()
    made = made or _annotated(name, at, script)
    return script.classes[made.pop()] if len(made) == 1 else None


def _annotated(name: str, at: ast.AST, script: Script) -> set[str]:
    scope = script.scope_of(at)
    word = last(name_of(annotation_of(scope, name))) if scope is not None else ""
    return {word} & script.classes.keys()


def _only_one(method: str, owner: str, script: Script) -> Function | None:
    """A method that just one class of the file has, with a name that is not everybody's."""
    if method in _ANYBODY or method.startswith("__") or owner.partition(".")[0] in script.imports:
        return None
    methods = [f for f in script.functions.get(method, ()) if isinstance(script.parents.get(f), ast.ClassDef)]
    return methods[0] if len(methods) == 1 == len(script.functions.get(method, ())) else None


def _is_empty(function: Function) -> bool:
    """A method that is there for subclasses to fill in."""
    body = [s for s in function.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    return all(isinstance(s, ast.Raise | ast.Pass) for s in body)


def method_of(owner: ast.ClassDef | None, name: str, script: Script, depth: int = 0) -> Function | None:
    """A method of a class, or of one of this file that it comes from."""
    if owner is None or depth > 4:
        return None
    own = [m for m in owner.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef) and m.name == name]
    if own:
        return own[0]
    bases = (script.classes.get(last(name_of(b))) for b in owner.bases)
    return next((m for m in (method_of(b, name, script, depth + 1) for b in bases if b is not None) if m), None)


def sites_of(function: Function, script: Script) -> list[ast.Call]:
    """Where a function is called; a forward, or a `__call__`, where an object of its class is."""
    owner = script.parents.get(function)
    if function.name not in ("forward", "__call__") or not isinstance(owner, ast.ClassDef):
        return list(script.calls.get(function.name, ()))
    objects = {
        last(name)
        for name, assigned in script.named.items()
        if any(isinstance(v, ast.Call) and name_of(v.func) == owner.name for _, v in assigned)
    }
    return [c for name in sorted(objects) for c in script.calls.get(name, ())]
