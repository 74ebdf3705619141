"""Who is who in a script: optimizers, schedulers, scalers, models, by how they are made and then by their names."""

import ast
from typing import Literal, final

from steadystep.check.bindings import parameters, passed
from steadystep.check.constructors import made
from steadystep.check.elements import elements
from steadystep.check.holders import networks_in
from steadystep.check.names import (
    argument,
    last,
    looks_like_model,
    looks_like_optimizer,
    looks_like_scaler,
    looks_like_scheduler,
    name_of,
    path_of,
)
from steadystep.check.script import Script
from steadystep.check.sources import named_sources, sources

Role = Literal["optimizer", "scheduler", "scaler", "guard", "other"]

ADAM_LIKE = frozenset(
    ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Lamb", "LAMB", "AdamW8bit", "Adam8bit", "PagedAdamW", "FusedAdam"]
)
OPTIMIZERS = ADAM_LIKE | frozenset(
    ["SGD", "RMSprop", "Adagrad", "Adadelta", "Adafactor", "Lion", "LARS", "LBFGS", "Rprop", "ASGD", "Muon"]
)
_LISTS = ("modules", "named_modules", "parameters", "children", "named_children")
_MANAGED = ("accelerator", "fabric", "engine", "trainer", "deepspeed")


@final
class Roles:
    """Answers for one script; each question is worked out once."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._known: dict[tuple[str, object], Role] = {}
        self._networks: dict[ast.Call, list[str] | None] = {}

    def of(self, name: str, at: ast.AST) -> Role:
        """What a name is at that place."""
        key = (name, self._script.scope_of(at))
        if key not in self._known:
            self._known[key] = self._work_out(name, at)
        return self._known[key]

    def _work_out(self, name: str, at: ast.AST) -> Role:
        if not name or name in self._script.imports:
            return "other"
        self._known[name, self._script.scope_of(at)] = "other"  # why: a name that leads back to itself says nothing
        for value in self._listed(name, at):
            role = self.of(path_of(value), value) if path_of(value) else self.made_by(value)
            if role != "other":
                return role
        if looks_like_scheduler(name):
            return "scheduler"
        if looks_like_scaler(name):
            return "scaler"
        if looks_like_optimizer(name):
            return "optimizer"
        return "other"

    def _listed(self, name: str, at: ast.AST) -> list[ast.expr]:
        """What a name comes from; of `opts[k]` all entries of the table."""
        found = [value for value, _ in named_sources(self._script, name, at)]
        if not found and name.endswith("]"):
            for table, _ in named_sources(self._script, name.rpartition("[")[0], at):
                found += [v for v, _ in elements(table, lambda e: sources(self._script, e))]
        return found

    def made_by(self, value: ast.expr) -> Role:
        """What a constructor makes."""
        if not isinstance(value, ast.Call):
            return "other"
        full, _ = made(value, self._script)
        leaf = last(full)
        if "lr_scheduler" in full or (leaf.startswith("get_") and "sched" in leaf) or leaf.endswith("LRScheduler"):
            return "scheduler"
        if leaf == "GradScaler":
            return "scaler"
        if full.startswith("torch.optim.") and not full.startswith("torch.optim.swa_utils"):
            return "optimizer"
        if leaf in OPTIMIZERS or full == "self.optimizers" or self._is_own(leaf):
            return "optimizer"
        if full.startswith("steadystep") and (leaf == "Guard" or full.endswith("Guard.resume")):
            return "guard"
        return "other"

    def _is_own(self, leaf: str) -> bool:
        """A class of this file that is an optimizer."""
        owner = self._script.classes.get(leaf)
        return owner is not None and any(last(name_of(b)) in ("Optimizer", *OPTIMIZERS) for b in owner.bases)

    def optimizer_call(self, name: str, at: ast.AST) -> ast.Call | None:
        """Where an optimizer is made, when the file shows exactly one such place."""
        calls = [
            v for v, _ in named_sources(self._script, name, at) if isinstance(v, ast.Call) and self.is_optimizer(v)
        ]
        return calls[0] if len(calls) == 1 else None

    def is_optimizer(self, call: ast.Call) -> bool:
        """Whether a call makes an optimizer."""
        return self.made_by(call) == "optimizer"

    def model_of(self, optimizer: ast.Call) -> str:
        """`model` for an optimizer of `model.parameters()`, or of some of them, and nothing else."""
        found = self.networks_of(optimizer)
        return found[0] if found is not None and len(found) == 1 else ""

    def networks_of(self, optimizer: ast.Call) -> list[str] | None:
        """Whose parameters an optimizer holds; None when some of them are not known."""
        if optimizer not in self._networks:
            params = argument(optimizer, 0, "params")
            self._networks[optimizer] = networks_in(params, self._script, optimizer) if params is not None else None
        return self._networks[optimizer]


def is_managed(name: str) -> bool:
    """Objects that do the wiring themselves: accelerate, fabric, deepspeed."""
    return any(word in last(name).lower() for word in _MANAGED)


def is_model_call(call: ast.Call, script: Script) -> bool:
    """`model(x)`: a call of something that is a network by its name or by how it was made."""
    if isinstance(call.func, ast.Subscript):
        return _is_entry(call.func, script)
    name = name_of(call.func)
    if (
        not name
        or name.partition(".")[0] in script.imports
        or last(name) in _LISTS
        or last(name) in script.functions
        or last(name) in script.classes
    ):
        return False
    if looks_like_model(name):
        return True
    if name in _used_as_networks(script):
        return True
    values = script.values(name, call)
    if any(makes_module(value, script) for value in values):
        return True
    followed = [v for value in values if path_of(value) for v, _ in sources(script, value)]
    return any(makes_module(value, script) for value in followed)


def _used_as_networks(script: Script) -> set[str]:
    """What parameters() or eval() is called on, what is given to a function that does, and what such a thing copies."""
    key = ("networks",)
    if key not in script.memo:
        script.memo[key] = set()
        calls = [c for name in ("parameters", "eval", "named_parameters") for c in script.calls.get(name, ())]
        owners = {name_of(c.func.value) for c in calls if isinstance(c.func, ast.Attribute)}
        for call in calls:
            owner = name_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
            scope = script.scope_of(call)
            if scope is not None and owner in parameters(scope):
                place = parameters(scope).index(owner) - (1 if parameters(scope)[:1] == ["self"] else 0)
                owners |= {name_of(passed(site, place, owner)) for site in script.calls.get(scope.name, ())}
        for call in script.calls.get("deepcopy", ()):
            target = script.parents.get(call)
            copied = name_of(call.args[0]) if call.args else ""
            if isinstance(target, ast.Assign) and name_of(target.targets[0]) in owners:
                owners.add(copied)
        script.memo[key] = owners - {"", "self", "cls"}
    found: set[str] = script.memo[key]
    return found


def _is_entry(entry: ast.Subscript, script: Script) -> bool:
    """`nets["user"](x)`: of a table that is named like networks, or that has networks in it."""
    base = path_of(entry.value)
    if not base:
        return False
    return looks_like_model(base) or any(makes_module(value, script) for value, _ in sources(script, entry))


def makes_module(value: ast.expr, script: Script) -> bool:
    """Whether an expression is a new network."""
    if not isinstance(value, ast.Call):
        return False
    full = script.full(value.func)
    if isinstance(value.func, ast.Attribute) and value.func.attr in ("to", "cuda", "train", "eval"):
        return makes_module(value.func.value, script)
    if full.startswith("torch.nn.") and not full.startswith(("torch.nn.functional", "torch.nn.init", "torch.nn.utils")):
        return not full.endswith("Loss")
    return last(full) in script.classes and is_module_class(script.classes[last(full)], script)


def is_module_class(node: ast.ClassDef, script: Script) -> bool:
    """Whether a class in this file is a network."""
    return any(last(script.full(base)) in ("Module", "LightningModule") for base in node.bases)
