"""Data for several processes: SS701 a sampler that never gets its epoch, SS703 a generator that workers share."""

import ast
from collections.abc import Iterator

from steadystep.lint.context import Context, Cycle, hit
from steadystep.lint.names import argument, last, name_of, path_of
from steadystep.lint.numbers import number_at
from steadystep.lint.report import Hit
from steadystep.lint.rules.passes import HELD_OUT, names_in
from steadystep.lint.script import Script
from steadystep.lint.sources import sources

_SETS_EPOCH = frozenset(["prepare", "setup_dataloaders", "prepare_data_loader", "fit", "Trainer"])
"""Frameworks that hand the epoch to the sampler themselves."""
_GENERATORS = ("default_rng", "RandomState", "Random", "Generator")
_ITEMS = ("__getitem__", "__iter__")


def check(context: Context) -> Iterator[Hit]:
    """Both."""
    yield from _no_epoch(context)
    yield from _shared_generator(context)


def _no_epoch(context: Context) -> Iterator[Hit]:
    script = context.script
    if "set_epoch" in script.attributes or (script.calls.keys() & _SETS_EPOCH) - {*script.classes, *script.functions}:
        return
    epochs = [c for c in context.cycles if len(c.step.loops) > 1 and isinstance(c.step.loops[-2].node, ast.For)]
    loaders = script.calls.get("DataLoader", ())
    for call in script.calls.get("DistributedSampler", ()):
        stmt = script.stmt_of(call)
        plain = isinstance(script.parents.get(call), ast.Assign | ast.IfExp)
        name = path_of(stmt.targets[0]) if isinstance(stmt, ast.Assign) and plain else ""
        given = [k.value for c in loaders for k in c.keywords if k.arg == "sampler"]
        used = call in given or any(call in [v for v, _ in sources(script, g)] for g in given)
        fixed = any(k.arg == "shuffle" and getattr(k.value, "value", True) is False for k in call.keywords)
        words = {last(name), *(names_in(call.args[0]) if call.args else set())}
        if not epochs or not used or fixed or any(HELD_OUT.search(w) for w in words):
            continue
        diff = _with_epoch(context, epochs[0], name, call)
        shown = name or "sampler"
        message = f"{shown}.set_epoch(epoch) is never called: every epoch has the same order"
        yield hit("SS701", call, message, diff=diff, snippet=f"{shown}.set_epoch(epoch)   # at the start of each epoch")


def _with_epoch(context: Context, cycle: Cycle, name: str, call: ast.Call) -> str:
    node, script = cycle.step.loops[-2].node, context.script
    if not isinstance(node, ast.For) or not isinstance(node.target, ast.Name) or not name.isidentifier():
        return ""
    if (
        isinstance(script.parents.get(call), ast.IfExp)
        or script.scope_of(node) is not script.scope_of(call)
        or isinstance(script.parents.get(script.stmt_of(call)), ast.If)
    ):
        return ""
    return context.edit().put_before(node.body[0], f"{name}.set_epoch({node.target.id})").diff()


def _shared_generator(context: Context) -> Iterator[Hit]:
    """A generator made in `__init__` of a dataset is copied into each worker as it is, and again in each epoch."""
    script = context.script
    for owner in script.classes.values():
        methods = {m.name: m for m in owner.body if isinstance(m, ast.FunctionDef)}
        if "__init__" not in methods or not methods.keys() & set(_ITEMS) or not _in_workers(script, owner):
            continue
        if "get_worker_info" in script.calls:
            continue
        used = {name_of(n) for m in methods.values() if m.name != "__init__" for n in ast.walk(m)}
        for stmt in ast.walk(methods["__init__"]):
            if not isinstance(stmt, ast.Assign) or not isinstance(stmt.value, ast.Call):
                continue
            held = name_of(stmt.targets[0])
            made = script.full(stmt.value.func)
            random = made.startswith(("numpy.random.", "random.", "torch.")) and last(made) in _GENERATORS
            if random and held.startswith("self.") and held in used:
                message = f"{held} is copied into every worker: all of them draw the same numbers, in every epoch"
                yield hit("SS703", stmt, message, snippet=_SEEDED)


def _in_workers(script: Script, owner: ast.ClassDef) -> bool:
    """A loader with workers, and no function that seeds them, goes over objects of a class."""
    for call in script.calls.get("DataLoader", ()):
        workers = argument(call, 5, "num_workers")
        many = number_at(workers, script, call) if workers is not None else 0
        if not many or any(k.arg in ("worker_init_fn", None) for k in call.keywords):
            continue
        data = argument(call, 0, "dataset")
        made = [v for v, _ in sources(script, data)] if data is not None else []
        if any(isinstance(v, ast.Call) and last(name_of(v.func)) == owner.name for v in made):
            return True
    return False


_SEEDED = """def seed_worker(worker_id):
    torch.utils.data.get_worker_info().dataset.rng = np.random.default_rng(torch.initial_seed())
loader = DataLoader(dataset, num_workers=4, worker_init_fn=seed_worker)"""
