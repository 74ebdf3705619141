"""Statements that give a network new parameters: a new head, a resized table, a wrapper that copies."""

import ast

from steadystep.lint.names import argument, calls_in, last, parameters, passed, path_of
from steadystep.lint.networks import is_module_class, makes_module
from steadystep.lint.script import Script
from steadystep.lint.targets import target_of

_NEW_FROM_OLD = ("FSDP", "FullyShardedDataParallel", "deepcopy", "get_peft_model")
_MOVES = ("to", "cuda", "cpu", "train", "eval", "float", "half")
_GROWS = ("resize_token_embeddings", "add_adapter", "reset_classifier")
_ADDS = ("add_module", "register_module", "register_parameter")
_SIZES = (
    "in_features",
    "out_features",
    "in_channels",
    "out_channels",
    "embedding_dim",
    "num_features",
    "num_embeddings",
)
_WITHOUT = ("Identity", "Dropout", "ReLU", "GELU", "Flatten", "Softmax", "Sigmoid", "Tanh")


def replaces(script: Script, stmt: ast.stmt, model: str, depth: int = 0) -> bool:
    """Whether a statement makes new parameters for a network, or for a part of it."""
    if isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Call):
        return _by_call(script, stmt.value, model, depth)
    if isinstance(stmt, ast.For):
        return _in_a_loop(script, stmt, model)
    if not isinstance(stmt, ast.Assign) or not isinstance(stmt.value, ast.Call):
        return False
    target, value = path_of(stmt.targets[0]), _core(stmt.value)
    if target.startswith((f"{model}.", f"{model}[")):
        return _is_new(script, value)
    if target != model and any(_by_call(script, c, model, depth) for c in calls_in(stmt.value) if _runs_here(c)):
        return True
    if target != model:
        return bool(target) and model.startswith(f"{target}.") and _is_new(script, value) and not _uses(value, target)
    if _uses(value, model):  # a wrapper keeps the parameters, but for those that make new ones
        return last(script.full(value.func)) in _NEW_FROM_OLD
    return makes_module(value, script) or last(script.full(value.func)) in ("from_pretrained", *_NEW_FROM_OLD)


def _in_a_loop(script: Script, loop: ast.For, model: str) -> bool:
    """`for block in model.blocks: block.adapter = nn.Linear(...)`."""
    if model not in {path_of(n) for n in ast.walk(loop.iter)}:
        return False
    each = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
    for stmt in (n for s in loop.body for n in ast.walk(s) if isinstance(n, ast.Assign)):
        head = path_of(stmt.targets[0]).partition(".")
        if head[0] in each and head[2] and isinstance(stmt.value, ast.Call) and _is_new(script, _core(stmt.value)):
            return True
    return False


def _core(value: ast.Call) -> ast.Call:
    """`make(3)` of `make(3).to(device)`."""
    while (
        isinstance(value.func, ast.Attribute) and value.func.attr in _MOVES and isinstance(value.func.value, ast.Call)
    ):
        value = value.func.value
    return value


def _runs_here(call: ast.Call) -> bool:
    """A plain function, which may change what it is given."""
    return isinstance(call.func, ast.Name)


def _is_new(script: Script, value: ast.Call) -> bool:
    name = script.full(value.func)
    return makes_module(value, script) and not name.endswith(_WITHOUT) and not _has_no_parameters(script, last(name))


def _has_no_parameters(script: Script, name: str) -> bool:
    """A class of this file, straight from Module, that makes nothing with parameters: a loss, an activation."""
    owner = script.classes.get(name)
    if owner is None or [last(path_of(b)) for b in owner.bases] != ["Module"]:
        return False
    if {n.attr for n in ast.walk(owner) if isinstance(n, ast.Attribute)} & set(_ADDS):
        return False
    kept = [n for n in ast.walk(owner) if isinstance(n, ast.Assign) and path_of(n.targets[0]).startswith("self.")]
    return not any(_may_hold_parameters(script.full(c.func)) for n in kept for c in calls_in(n))


def _may_hold_parameters(full: str) -> bool:
    plain = full.startswith("torch.") and last(full)[:1].islower() and not full.startswith("torch.nn.")
    return not (plain or full.endswith(("Loss", *_WITHOUT)) or full in ("int", "float", "bool", "str", "len"))


def _uses(value: ast.expr, model: str) -> bool:
    """Whether a network goes into an expression, and not only one of its sizes."""
    inner = [value]
    while inner:
        node = inner.pop()
        if isinstance(node, ast.Attribute) and node.attr in _SIZES:
            continue
        if isinstance(node, ast.expr) and path_of(node) == model:
            return True
        inner += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        inner += [k.value for k in getattr(node, "keywords", ())]
    return False


def _by_call(script: Script, call: ast.Call, model: str, depth: int) -> bool:
    """`model.resize_token_embeddings(n)`, `setattr(model, "fc", nn.Linear(...))`, a function that does it."""
    owner = path_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    leaf = call.func.attr if isinstance(call.func, ast.Attribute) else path_of(call.func)
    if owner and (owner == model or owner.startswith(f"{model}.")):
        given = argument(call, 1, "module")
        added = leaf in _ADDS and isinstance(given, ast.Call) and _is_new(script, given)
        return added or (owner == model and (leaf in _GROWS or _renews_itself(script, call)))
    if leaf == "setattr" and len(call.args) == 3 and path_of(call.args[0]) == model:
        return isinstance(call.args[2], ast.Call) and _is_new(script, call.args[2])
    function = target_of(call, script) if depth < 1 else None
    if function is None:
        return False
    if owner == "self" and model.startswith("self."):
        return any(replaces(script, inner, model, depth + 1) for inner in function.body)
    names = parameters(function)
    skip = 1 if names[:1] in (["self"], ["cls"]) else 0
    for position, name in enumerate(names[skip:]):
        given = passed(call, position, name)
        if given is not None and path_of(given) == model:
            return any(replaces(script, inner, name, depth + 1) and _inside(inner, name) for inner in function.body)
    return False


def _renews_itself(script: Script, call: ast.Call) -> bool:
    """`model.set_head(10)`, of a network of this file that makes itself a new part."""
    function = target_of(call, script)
    owner = script.parents.get(function) if function is not None else None
    if function is None or not isinstance(owner, ast.ClassDef) or not is_module_class(owner, script):
        return False
    return any(
        isinstance(s, ast.Assign)
        and path_of(s.targets[0]).startswith("self.")
        and isinstance(s.value, ast.Call)
        and _is_new(script, s.value)
        for s in function.body
    )


def _inside(stmt: ast.stmt, name: str) -> bool:
    """It changes what was given, and does not only use its name for something new."""
    return not isinstance(stmt, ast.Assign) or path_of(stmt.targets[0]) != name
