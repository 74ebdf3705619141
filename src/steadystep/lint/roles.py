"""Who is who in a script: optimizers, schedulers, scalers, models, by how they are made and then by their names."""

import ast
from typing import Literal, final

from steadystep.lint.constructors import made
from steadystep.lint.names import (
    argument,
    last,
    looks_like_optimizer,
    looks_like_scaler,
    looks_like_scheduler,
    name_of,
    parameters,
    path_of,
)
from steadystep.lint.script import Script
from steadystep.lint.sources import elements, named_sources, sources

_ALL = ("parameters", "named_parameters")
_JOIN = ("chain", "from_iterable", "list", "tuple", "iter", "set", "sum")
ScriptRole = Literal["optimizer", "scheduler", "scaler", "guard", "other"]
ADAM_LIKE = frozenset(
    ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Lamb", "LAMB", "AdamW8bit", "Adam8bit", "PagedAdamW", "FusedAdam"]
)
OPTIMIZERS = ADAM_LIKE | frozenset(
    ["SGD", "RMSprop", "Adagrad", "Adadelta", "Adafactor", "Lion", "LARS", "LBFGS", "Rprop", "ASGD", "Muon"]
)
_OF_OPTIMIZERS = frozenset(["step", "zero_grad", "param_groups", "state_dict", "load_state_dict", "state"])
_MANAGED = ("accelerator", "fabric", "engine", "trainer", "deepspeed")


def networks_in(params: ast.expr, script: Script, at: ast.AST, depth: int = 0) -> list[str] | None:
    """The networks, in order; None when some of it is not known."""
    if depth > 6:
        return None
    parts = _parts(params, script, at)
    if parts is None:
        return None
    found: list[str] = []
    for part in parts:
        if isinstance(part, str):
            inner: list[str] | None = [part]
        else:
            inner = networks_in(part, script, at, depth + 1)
        if inner is None:
            return None
        found += [name for name in inner if name not in found]
    return found or None


def _parts(params: ast.expr, script: Script, at: ast.AST) -> list[str | ast.expr] | None:
    if isinstance(params, ast.Starred):
        return [params.value]
    if isinstance(params, ast.Call):
        return _of_call(params)
    if isinstance(params, ast.ListComp | ast.GeneratorExp):
        return _of_comprehension(params)
    if isinstance(params, ast.List | ast.Tuple):
        return list(params.elts)
    if isinstance(params, ast.BinOp) and isinstance(params.op, ast.Add):
        return [params.left, params.right]
    if isinstance(params, ast.Dict):
        pairs = zip(params.keys, params.values, strict=True)
        return [v for k, v in pairs if isinstance(k, ast.Constant) and k.value == "params"]
    if path_of(params):
        name = path_of(params)
        values = {id(v): v for v in script.values(name, at)}
        changed = any(
            isinstance(n, ast.AugAssign | ast.Attribute)
            and path_of(getattr(n, "target", getattr(n, "value", None))) == name
            for n in script.nodes
        )
        return list(values.values()) if len(values) == 1 and not changed else None
    return None


def _of_comprehension(params: ast.ListComp | ast.GeneratorExp) -> list[str | ast.expr] | None:
    """`[p for p in net.parameters() if ...]`, and `[p for net in (a, b) for p in net.parameters()]`."""
    if len(params.generators) == 1:
        return [params.generators[0].iter]
    outer, inner = params.generators[0], params.generators[-1]
    source = inner.iter
    if len(params.generators) != 2 or not isinstance(source, ast.Call) or not isinstance(source.func, ast.Attribute):
        return None
    listed = outer.iter.elts if isinstance(outer.iter, ast.Tuple | ast.List) else []
    if source.func.attr not in _ALL or name_of(source.func.value) != name_of(outer.target) or not listed:
        return None
    paths = [path_of(entry) for entry in listed]
    return list(paths) if all(paths) else None


def _of_call(call: ast.Call) -> list[str | ast.expr] | None:
    if isinstance(call.func, ast.Attribute) and call.func.attr in _ALL:
        owner = path_of(call.func.value)
        return [owner] if owner else None
    leaf = last(name_of(call.func))
    if leaf == "filter" and len(call.args) == 2:
        return [call.args[1]]
    if leaf == "dict":
        return [k.value for k in call.keywords if k.arg == "params"] or None
    return list(call.args) if leaf in _JOIN and call.args else None


@final
class Roles:
    """Answers for one script; each question is worked out once."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._known: dict[tuple[str, object], ScriptRole] = {}
        self._networks: dict[ast.Call, list[str] | None] = {}

    def of(self, name: str, at: ast.AST) -> ScriptRole:
        """What a name is at that place."""
        key = (name, self._script.scope_of(at))
        if key not in self._known:
            self._known[key] = self._work_out(name, at)
        return self._known[key]

    def _work_out(self, name: str, at: ast.AST) -> ScriptRole:
        if not name or name in self._script.imports:
            return "other"
        self._known[name, self._script.scope_of(at)] = "other"  # why: a name that leads back to itself says nothing
        listed = self._listed(name, at)
        if self._is_called(name, at) and not any(self.made_by(value) == "optimizer" for value in listed):
            return "other"
        for value in listed:
            role = self.of(path_of(value), value) if path_of(value) else self.made_by(value)
            if role != "other":
                return role
        if looks_like_scheduler(name):
            return "scheduler"
        if looks_like_scaler(name):
            return "scaler"
        return "optimizer" if looks_like_optimizer(name) and not self._is_options(name) else "other"

    def _is_options(self, name: str) -> bool:
        """`opt = parser.parse_args()`, or an `opt` of which only settings are read."""
        if last(name).lower() not in ("opt", "opts"):
            return False
        read = self._script.once("read of", lambda: _read_of(self._script)).get(name, set())
        return bool(read) and not read & _OF_OPTIMIZERS

    def _is_called(self, name: str, at: ast.AST) -> bool:
        """A parameter that is used like a function, as no optimizer of torch is: `optim(params)`."""
        scope = self._script.scope_of(at)
        if scope is None or name not in parameters(scope) or (scope, name) in self._script.assigned:
            return False
        calls = [c for c in self._script.calls.get(name, ()) if isinstance(self._script.parents.get(c), ast.Expr)]
        return any(isinstance(c.func, ast.Name) and self._script.scope_of(c) is scope for c in calls)

    def _listed(self, name: str, at: ast.AST) -> list[ast.expr]:
        """What a name comes from; of `opts[k]` all entries of the table."""
        found = [value for value, _ in named_sources(self._script, name, at)]
        if not found and name.endswith("]"):
            for table, _ in named_sources(self._script, name.rpartition("[")[0], at):
                found += [v for v, _ in elements(table, lambda e: sources(self._script, e))]
        return found

    def made_by(self, value: ast.expr) -> ScriptRole:
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


def _read_of(script: Script) -> dict[str, set[str]]:
    """What is read of each name: `{"opt": {"lr", "batch_size"}}`."""
    found: dict[str, set[str]] = {}
    for node in script.nodes:
        if isinstance(node, ast.Attribute) and path_of(node.value):
            found.setdefault(path_of(node.value), set()).add(node.attr)
    return found


def is_managed(name: str) -> bool:
    """Objects that do the wiring themselves: accelerate, fabric, deepspeed."""
    return any(word in last(name).lower() for word in _MANAGED)
