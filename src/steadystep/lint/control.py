"""Small questions about control flow, names and context managers that the walk asks."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence

from steadystep.lint.events import INTERESTING
from steadystep.lint.names import last, name_of, path_of
from steadystep.lint.networks import is_model_call
from steadystep.lint.script import Function, Script
from steadystep.lint.sources import sources
from steadystep.lint.targets import target_of

HARMLESS = frozenset(
    [
        *(
            "print",
            "len",
            "id",
            "zip",
            "enumerate",
            "gather",
            "gather_for_metrics",
            "unwrap_model",
            "wait_for_everyone",
            "log",
            "log_dict",
        ),
        *("save_state", "load_state", "save", "prepare", "accumulate", "no_sync", "reduce", "pad_across_processes"),
        *("init_trackers", "end_training", "skip_first_batches", "get_state_dict", "register_for_checkpointing"),
        *("toggle_optimizer", "untoggle_optimizer", "all_gather", "all_reduce", "barrier", "broadcast", "log_metrics"),
        *("scale_loss", "move_to", "_found_inf_per_device", "is_enabled", "get_scale"),
        *("setup", "setup_module", "setup_optimizers", "setup_dataloaders", "seed_everything", "launch", "to_device"),
    ]
)
"""Calls of a framework, or calls that are given an optimizer, which neither step nor clear nor go back."""


_HEAD = re.compile(r"\w+")
_MAKES = ("contextmanager", "asynccontextmanager")


def is_no_grad(node: ast.AST) -> bool:
    """`torch.no_grad()`, `torch.inference_mode()`, `torch.set_grad_enabled(...)`."""
    name = last(name_of(node.func if isinstance(node, ast.Call) else node))
    return name in ("no_grad", "inference_mode", "set_grad_enabled")


def surely_off(node: ast.AST) -> bool:
    """Not `set_grad_enabled(training)`, which may be on."""
    given = [*node.args, *(k.value for k in node.keywords)] if isinstance(node, ast.Call) else []
    return not given or (isinstance(given[0], ast.Constant) and (given[0].value is False) == _switches(node))


def _switches(node: ast.AST) -> bool:
    """`set_grad_enabled(False)`; `inference_mode(True)` is the other way round."""
    return last(name_of(node.func if isinstance(node, ast.Call) else node)) == "set_grad_enabled"


def outer(name: str, names: Mapping[str, str]) -> str:
    """A name as the outermost caller writes it."""
    head = _HEAD.match(name)
    return names.get(head[0], head[0]) + name[head.end() :] if head is not None else name


def bind(function: Function, call: ast.Call, names: Mapping[str, str]) -> dict[str, str]:
    """What the caller calls the parameters of a function."""
    parameters = [p.arg for p in (*function.args.posonlyargs, *function.args.args)]
    bound = {}
    if parameters[:1] == ["self"]:
        owner = name_of(call.func).rpartition(".")[0]
        bound["self"] = outer(owner, names) if owner else "self"
        parameters = parameters[1:]
    given: Iterator[tuple[str, ast.expr]] = zip(parameters, call.args, strict=False)
    for parameter, value in [*given, *((k.arg, k.value) for k in call.keywords if k.arg)]:
        if path_of(value):
            bound[parameter] = outer(path_of(value), names)
    return bound


def ends(body: Sequence[ast.stmt]) -> bool:
    """Nothing after this block is reached through it."""
    return bool(body) and isinstance(body[-1], ast.Continue | ast.Break | ast.Return | ast.Raise)


def leaves_loop(body: Sequence[ast.stmt]) -> bool:
    """The loop is left at the end of this block."""
    return bool(body) and isinstance(body[-1], ast.Break | ast.Return | ast.Raise)


def is_main_guard(stmt: ast.If) -> bool:
    """`if __name__ == "__main__":`, which is taken for granted."""
    return isinstance(stmt.test, ast.Compare) and name_of(stmt.test.left) == "__name__"


def _running(script: Script) -> set[Function]:
    """Functions that run a network; the forward of one is a part of it."""
    found = set()
    for calls in list(script.calls.values()):
        for call in calls:
            scope = script.scope_of(call)
            if scope is not None and scope not in found and scope.name != "forward" and is_model_call(call, script):
                found.add(scope)
    return found


def worth_following(script: Script) -> set[Function]:
    """Functions in which, or below which, something happens that matters."""
    below: dict[Function, set[str]] = {}
    for group in script.functions.values():
        for function in group:
            names = set()
            for node in ast.walk(function):
                if isinstance(node, ast.Call):
                    names.add(node.func.attr if isinstance(node.func, ast.Attribute) else name_of(node.func))
                elif isinstance(node, ast.Attribute) and node.attr == "grad" and isinstance(node.ctx, ast.Store):
                    names.add("zero_grad")
                elif isinstance(node, ast.Yield) and function.decorator_list:
                    names.add("autocast")  # a context manager: what is around a training loop may be in it
            below[function] = names
    found = {f for f, names in below.items() if names & INTERESTING} | _running(script)
    while True:
        worth = {f.name for f in found} | {"__call__"} & {f.name for f in found}
        more = {f for f, names in below.items() if f not in found and names & worth}
        if not more:
            return found
        found |= more


def callers_first(functions: set[Function], script: Script) -> list[Function]:
    """Those that nothing in the file calls first, then by their lines."""

    def is_called(function: Function) -> bool:
        return any(script.scope_of(site) is not function for site in script.calls.get(function.name, ()))

    return sorted(functions, key=lambda f: (is_called(f), f.lineno))


def managed_by(given: ast.expr, script: Script) -> list[Function]:
    """What runs around the body of a `with`: a generator of this file, or `__enter__` and `__exit__` of a class."""
    if not isinstance(given, ast.Call):
        return []
    function = target_of(given, script)
    if function is not None and any(last(name_of(d)) in _MAKES for d in function.decorator_list):
        return [function]
    owner = script.classes.get(last(name_of(given.func)))
    methods = {m.name: m for m in owner.body if isinstance(m, ast.FunctionDef)} if owner is not None else {}
    return [methods["__enter__"], methods["__exit__"]] if {"__enter__", "__exit__"} <= methods.keys() else []


def inner_body(stmt: ast.With | ast.AsyncWith, items: list[ast.withitem]) -> list[ast.stmt]:
    """What runs inside of one manager of a `with`: the others, and then the body."""
    return [ast.copy_location(ast.With(items=items, body=stmt.body), stmt)] if items else stmt.body


def switches_off(given: ast.AST, script: Script) -> bool:
    """Whether gradients are surely off inside of a manager, or of a function through what decorates it."""
    if isinstance(given, ast.FunctionDef | ast.AsyncFunctionDef):
        return any(switches_off(d, script) for d in given.decorator_list)
    if is_no_grad(given):
        return surely_off(given)
    if isinstance(given, ast.Name | ast.Attribute) and not isinstance(script.parents.get(given), ast.Call):
        made = [v for v, _ in sources(script, given) if v is not given]
        if made:
            return all(isinstance(v, ast.Call) and is_no_grad(v) and surely_off(v) for v in made)
    name = name_of(given.func if isinstance(given, ast.Call) else given)
    functions = script.functions.get(name, []) if name else []
    return len(functions) == 1 and _off_inside(functions[0])


def _off_inside(function: Function) -> bool:
    """`with torch.no_grad(): yield`, or `with torch.no_grad(): return fn(...)`."""
    if not any(isinstance(n, ast.FunctionDef | ast.Lambda | ast.Yield) for s in function.body for n in ast.walk(s)):
        return False
    for node in ast.walk(function):
        if isinstance(node, ast.With) and any(
            is_no_grad(i.context_expr) and surely_off(i.context_expr) for i in node.items
        ):
            return any(isinstance(n, ast.Yield | ast.Return) for n in ast.walk(node))
        if (
            isinstance(node, ast.FunctionDef)
            and node is not function
            and any(is_no_grad(d) for d in node.decorator_list)
        ):
            return True
    return False
