"""Small questions about control flow and names that the walk asks."""

import ast
from collections.abc import Iterator, Mapping, Sequence

from steadystep.check.events import INTERESTING
from steadystep.check.names import last, name_of, path_of
from steadystep.check.script import Function, Script

HARMLESS = frozenset(
    [
        *("print", "len", "id", "gather", "gather_for_metrics", "unwrap_model", "wait_for_everyone", "log", "log_dict"),
        *("save_state", "load_state", "save", "prepare", "accumulate", "no_sync", "reduce", "pad_across_processes"),
        *("init_trackers", "end_training", "skip_first_batches", "get_state_dict", "register_for_checkpointing"),
        *("toggle_optimizer", "untoggle_optimizer", "all_gather", "all_reduce", "barrier", "broadcast", "log_metrics"),
        *("setup", "setup_module", "setup_optimizers", "setup_dataloaders", "seed_everything", "launch", "to_device"),
    ]
)
"""Calls of a framework, or calls that are given an optimizer, which neither step nor clear nor go back."""


def is_no_grad(node: ast.AST) -> bool:
    """`torch.no_grad()`, `torch.inference_mode()`, `torch.set_grad_enabled(...)`."""
    name = last(name_of(node.func if isinstance(node, ast.Call) else node))
    return name in ("no_grad", "inference_mode", "set_grad_enabled")


def grad_off(function: Function) -> bool:
    """A decorator switches gradients off."""
    return any(is_no_grad(decorator) for decorator in function.decorator_list)


def outer(name: str, names: Mapping[str, str]) -> str:
    """A name as the outermost caller writes it."""
    head, dot, rest = name.partition(".")
    return names.get(head, head) + dot + rest


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
            below[function] = names
    found = {f for f, names in below.items() if names & INTERESTING}
    while True:
        worth = {f.name for f in found} | {"__call__"} & {f.name for f in found}
        more = {f for f, names in below.items() if f not in found and names & worth}
        if not more:
            return found
        found |= more
