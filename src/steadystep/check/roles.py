"""Who is who in a script: optimizers, schedulers, scalers, models, by how they are made and then by their names."""

import ast
from typing import Literal, final

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

Role = Literal["optimizer", "scheduler", "scaler", "guard", "other"]

ADAM_LIKE = frozenset(
    ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Lamb", "LAMB", "AdamW8bit", "Adam8bit", "PagedAdamW", "FusedAdam"]
)
OPTIMIZERS = ADAM_LIKE | frozenset(
    ["SGD", "RMSprop", "Adagrad", "Adadelta", "Adafactor", "Lion", "LARS", "LBFGS", "Rprop", "ASGD", "Muon"]
)
_ENTRIES = ("values", "items")
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
            made = self.of(path_of(value), value) if path_of(value) else self.made_by(value)
            if made != "other":
                return made
        for value in self._script.values(name, at):
            made = self.made_by(value)
            if made == "other" and path_of(value) and path_of(value) != name and "]" in name:
                made = self.of(path_of(value), value)
            if made != "other":
                return made
        if looks_like_scheduler(name):
            return "scheduler"
        if looks_like_scaler(name):
            return "scaler"
        if looks_like_optimizer(name):
            return "optimizer"
        return "other"

    def _listed(self, name: str, at: ast.AST) -> list[ast.expr]:
        """`o` of `for o in optimizers:` and of `for name, o in optimizers.items():`, as far as they are written out."""
        for loop in self._script.ancestors(at):
            if not isinstance(loop, ast.For | ast.AsyncFor) or name not in {name_of(n) for n in ast.walk(loop.target)}:
                continue
            over = loop.iter
            if isinstance(over, ast.Call) and isinstance(over.func, ast.Attribute) and over.func.attr in _ENTRIES:
                over = over.func.value
            values = [over] if isinstance(over, ast.List | ast.Tuple) else self._script.values(path_of(over), at)
            return [e for value in values for e in _elements(value)]
        return []

    def made_by(self, value: ast.expr) -> Role:
        """What a constructor makes."""
        if not isinstance(value, ast.Call):
            return "other"
        full = self._script.full(value.func)
        leaf = last(full)
        if "lr_scheduler" in full or (leaf.startswith("get_") and "sched" in leaf) or leaf.endswith("LRScheduler"):
            return "scheduler"
        if leaf == "GradScaler":
            return "scaler"
        if full.startswith("torch.optim.") or leaf in OPTIMIZERS:
            return "optimizer"
        if full.startswith("steadystep") and (leaf == "Guard" or full.endswith("Guard.resume")):
            return "guard"
        return "other"

    def optimizer_call(self, name: str, at: ast.AST) -> ast.Call | None:
        """Where an optimizer is made, when the file shows exactly one such place."""
        made = {id(v): v for v in self._script.values(name, at) if isinstance(v, ast.Call) and self.is_optimizer(v)}
        return next(iter(made.values())) if len(made) == 1 else None

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


def _elements(table: ast.expr) -> list[ast.expr]:
    match table:
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return elements
        case ast.Dict(values=entries):
            return entries
        case ast.DictComp(value=entry):
            return [entry]
        case ast.ListComp(elt=entry):
            return [entry]
    return []


def is_managed(name: str) -> bool:
    """Objects that do the wiring themselves: accelerate, fabric, deepspeed."""
    return any(word in last(name).lower() for word in _MANAGED)


def is_model_call(call: ast.Call, script: Script) -> bool:
    """`model(x)`: a call of something that is a network by its name or by how it was made."""
    name = name_of(call.func)
    if not name or name in script.imports or last(name) in script.functions or last(name) in script.classes:
        return False
    if looks_like_model(name):
        return True
    return any(makes_module(value, script) for value in script.values(name, call))


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
