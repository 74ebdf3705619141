"""Who runs a function that evaluates: a framework, or a file that is not here."""

import ast

from steadystep.lint.bindings import parameters
from steadystep.lint.names import last, name_of
from steadystep.lint.rules.passes import HELD_OUT, TRAIN, names_in
from steadystep.lint.script import Function, Scope, Script
from steadystep.lint.targets import target_of

_HOOKS = frozenset(["training_step", "validation_step", "test_step", "shared_step", "configure_optimizers"])
_PLAIN_BASES = ("Module", "object", "ABC", "Generic", "Protocol", "Dataset", "NamedTuple", "TestCase")
_AROUND = (
    "enumerate",
    "zip",
    "tqdm",
    "trange",
    "track",
    "iter",
    "list",
    "islice",
    "reversed",
    "sorted",
    "range",
    "len",
)
_PARTS = ("split", "chunk", "unbind", "unfold", "items", "values", "tensor_split", "array_split")


def run_by_framework(script: Script, scope: Scope) -> bool:
    """A method of a class whose base, from another file, switches the modes: a LightningModule or the like."""
    owner = script.class_of(scope) if scope is not None else None
    if owner is None:
        return False
    bases = [last(script.full(base)) for base in owner.bases]
    if any(base.endswith(("LightningModule", "LightningDataModule")) for base in bases):
        return True
    methods = {m.name for m in owner.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)}
    unknown = [base for base in bases if base and base not in script.classes and base not in _PLAIN_BASES]
    return bool(unknown) and bool(methods & _HOOKS)


def called_from_elsewhere(script: Script, scope: Scope, forwards: list[ast.Call], loop: ast.AST) -> bool:
    """Nobody here calls it, it is given the network, and it goes over one batch: what runs it may hold no_grad."""
    if scope is None or script.calls.get(scope.name) or not forwards:
        return False
    given = set(parameters(scope))
    if not all(name_of(call.func).partition(".")[0] in given - {"self", "cls"} for call in forwards):
        return False
    over = loop.iter if isinstance(loop, ast.For | ast.AsyncFor) else None
    if over is None and isinstance(loop, ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp):
        over = loop.generators[0].iter
    return over is not None and not any(_is_data(script, scope, core) for core in _cores(over))


def _cores(over: ast.expr) -> list[ast.expr]:
    """`loader` of `enumerate(tqdm(loader))`."""
    if isinstance(over, ast.Starred):
        return _cores(over.value)
    if isinstance(over, ast.Call) and last(name_of(over.func)) in _AROUND:
        return [core for inner in over.args for core in _cores(inner)]
    return [over]


def _is_data(script: Script, scope: Function, core: ast.expr) -> bool:
    """Something that is gone through once an epoch, not the parts of a batch."""
    if any(HELD_OUT.search(word) or TRAIN.search(word) or "load" in word.lower() for word in names_in(core)):
        return True
    if isinstance(core, ast.Name):
        return (scope, core.id) not in script.assigned
    if isinstance(core, ast.Call):
        return not (isinstance(core.func, ast.Attribute) and core.func.attr in _PARTS)
    return isinstance(core, ast.Attribute)


def put_into_eval_before(script: Script, site: ast.Call) -> bool:
    """The last that the caller runs above this line and that sets a mode has switched to eval, and not back."""
    scope = script.scope_of(site)
    above = [c for calls in script.calls.values() for c in calls if c.lineno < site.lineno]
    for call in sorted((c for c in above if script.scope_of(c) is scope), key=lambda c: -c.lineno):
        function = target_of(call, script)
        around: ast.AST = function if function is not None else call.func
        words = {n.attr for n in ast.walk(around) if isinstance(n, ast.Attribute)}
        if words & {"eval", "train"}:
            return function is not None and not words & {"train", "backward", "step"}
    return False
