"""Passes over data: loops that run a network, which of them train and which only measure, and who calls them."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from steadystep.lint.context import Context
from steadystep.lint.events import EnteredLoop, Event
from steadystep.lint.names import calls_in, last, name_of, parameters, passed
from steadystep.lint.networks import is_model_call
from steadystep.lint.script import Function, Script, ScriptScope
from steadystep.lint.targets import target_of

HELD_OUT = re.compile(
    r"(^|_)(val|valid|validation|eval|test|dev|holdout|heldout)(_|$|\d|dl|loader|set|data|iter)", re.I
)
TRAIN = re.compile(r"(^|_)train(ing)?(_|$|dl|loader|set|data)", re.I)
_TRAINS = re.compile(r"^_?(train|learn|fit|optimi[sz]e|backprop)(_|$)|^_?(g|d|gen|disc|opt|optim)_step$", re.I)
_GOES_BACK = ("backward", "manual_backward")
_DEEPEST = 3

ForLoop = ast.For | ast.AsyncFor
_TRAINING_EVENTS = ("backward", "step", "scaler-step", "opaque", "guard", "grad-call")
_MODES = ("train", "eval", "mode")
_SHORT = frozenset(["va", "te", "vl", "tst", "vld", "dl_va", "va_dl", "dl_te", "te_dl", "heldout", "held_out"])
_RANDOM = re.compile(r"mc_|dropout|uncertain|bayes|ensemble|update_bn|recalibrat|calibrate", re.I)
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


@final
@dataclass(frozen=True, slots=True)
class Pass:
    """One loop or comprehension with networks in it."""

    node: ast.AST
    stmt: ast.stmt
    scope: ScriptScope
    over: frozenset[str]
    """Names of what it goes over, by the callers' names too."""
    forwards: tuple[ast.Call, ...]


def passes(context: Context) -> Iterator[Pass]:
    """Every one that does not train."""
    script = context.script
    for node in script.nodes:
        if isinstance(node, ast.For | ast.AsyncFor):
            over, calls = node.iter, [c for s in node.body for c in calls_in(s)]
        elif isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp):
            parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            over, calls = node.generators[0].iter, [c for part in parts for c in calls_in(part)]
        else:
            continue
        forwards = tuple(c for c in calls if is_model_call(c, script) or leads_to_one(c, script))
        if forwards and not trains(context, node) and len(script.loops_of(node)) <= 2:
            scope = script.scope_of(node)
            yield Pass(node, script.stmt_of(node), scope, frozenset(_over(script, over, scope)), forwards)


def steps_in(context: Context, node: ast.AST) -> bool:
    """Whether a step or a backward stands in it."""
    steps = context.script.once("nodes that step", lambda: _that_step(context))
    return any(inner in steps for inner in ast.walk(node))


def _that_step(context: Context) -> set[ast.AST]:
    found = context.events("backward", "step", "scaler-step", "guard", "opaque")
    return {e.node for e in found if e.kind != "opaque" or e.owner}


def trains(context: Context, node: ast.AST) -> bool:
    """Whether a step or a backward is in it, or may be in what it calls."""
    inside = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
    return steps_in(context, node) or any(_may_train(call, context.script) for call in inside)


def _may_train(call: ast.Call, script: Script, depth: int = 0) -> bool:
    """A call into this file that goes back somewhere below, or one out of it that is named like that."""
    function = target_of(call, script)
    if function is None:
        leaf = call.func.attr if isinstance(call.func, ast.Attribute) else name_of(call.func)
        return bool(_TRAINS.search(leaf)) and not (leaf == "train" and isinstance(call.func, ast.Attribute))
    calls = [c for stmt in function.body for c in calls_in(stmt)]
    if any(isinstance(c.func, ast.Attribute) and c.func.attr in _GOES_BACK for c in calls):
        return True
    return depth < _DEEPEST and any(_may_train(c, script, depth + 1) for c in calls)


def leads_to_one(call: ast.Call, script: Script, depth: int = 0) -> bool:
    """A call into this file that runs a network, perhaps through others, and does nothing else of interest."""
    function = target_of(call, script) if depth < _DEEPEST else None
    if function is None:
        return False
    calls = [c for stmt in function.body for c in calls_in(stmt)]
    busy = any(
        isinstance(c.func, ast.Attribute) and c.func.attr in ("backward", "eval", "train", "step") for c in calls
    )
    return not busy and any(is_model_call(c, script) or leads_to_one(c, script, depth + 1) for c in calls)


def names_in(node: ast.AST) -> set[str]:
    """Last parts of names, and texts."""
    found = {last(name_of(n)) for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute)}
    return found | {str(n.value) for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def _over(script: Script, node: ast.expr, scope: ScriptScope) -> set[str]:
    found = names_in(node)
    if scope is None or any(HELD_OUT.search(n) or TRAIN.search(n) for n in found):
        return found
    given = [words for name in sorted(found) if name in parameters(scope) for words in _given(script, scope, name)]
    # why all: a function that is called with both kinds of data is about neither
    held_out = [words for words in given if any(HELD_OUT.search(n) for n in words)]
    return found.union(*given) if given and len(held_out) == len(given) else found


def _given(script: Script, function: ScriptScope, name: str) -> list[set[str]]:
    """The names of what each caller gives."""
    if function is None:
        return []
    names = parameters(function)
    position = names.index(name) - (1 if names[:1] in (["self"], ["cls"]) else 0)
    sites = [c for c in script.calls.get(function.name, ()) if script.scope_of(c) is not function]
    values = [passed(c, position, name) for c in sites]
    return [names_in(v) if v is not None else set() for v in values]


@final
@dataclass(frozen=True, slots=True)
class MeasuredPass:
    """One pass that runs networks and does not train."""

    loop: EnteredLoop
    forwards: tuple[Event, ...]
    root: tuple[Event, ...]
    twin: bool
    """The same loop trains when it is met elsewhere, with another flag or in another phase."""
    held_out: bool

    @property
    def quiet(self) -> bool:
        """Gradients are off."""
        return all(e.no_grad for e in self.forwards)

    def mode(self) -> Event | None:
        """What was last called of train() and eval() on the network that runs here, before it does."""
        first = self.forwards[0]
        before = self.root[: self.root.index(first)]
        mine = [e for e in before if e.kind in _MODES and _is_about(e, first)]
        return mine[-1] if mine else None


def measured_passes(context: Context) -> Iterator[MeasuredPass]:
    """All of them."""
    training = {loop.node for root in context.roots for loop in _trained(root)}
    for root in context.roots:
        trained = _trained(root)
        seen: set[EnteredLoop] = set()
        for event in root:
            loop = event.inner
            if event.kind != "forward" or loop is None or loop in seen or not _is_over_data(loop):
                continue
            seen.add(loop)
            if loop in trained or _is_random(context, loop):
                continue
            forwards = tuple(e for e in root if e.kind == "forward" and loop in e.loops)
            words = loop.over | loop.phases
            held_out = any(HELD_OUT.search(w) or w in _SHORT for w in words) and not any(TRAIN.search(w) for w in words)
            yield MeasuredPass(loop, forwards, root, loop.node in training, held_out)


def training_loops(root: tuple[Event, ...]) -> list[EnteredLoop]:
    """The loops that go over the data they train on."""
    return [loop for loop in _trained(root) if _is_over_data(loop)]


def _trained(root: tuple[Event, ...]) -> list[EnteredLoop]:
    return list(
        dict.fromkeys(
            loop for e in root if e.kind in _TRAINING_EVENTS and (e.kind != "opaque" or e.owner) for loop in e.loops
        )
    )


def _is_over_data(loop: EnteredLoop) -> bool:
    """Not a count, not a wait: something is taken from somewhere."""
    if isinstance(loop.node, ast.While):
        return False
    over = loop.node.iter if isinstance(loop.node, ast.For | ast.AsyncFor) else loop.node.generators[0].iter
    return not (isinstance(over, ast.Call) and name_of(over.func) in ("range", "reversed", "trange"))


def _is_about(mode: Event, forward: Event) -> bool:
    """The network itself, or one that it is a part of."""
    return f"{forward.owner}.".startswith((f"{mode.owner}.", f"{mode.owner}["))


def _is_random(context: Context, loop: EnteredLoop) -> bool:
    scope = context.script.scope_of(loop.node)
    return scope is not None and bool(_RANDOM.search(scope.name))


def run_by_framework(script: Script, scope: ScriptScope) -> bool:
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


def called_from_elsewhere(script: Script, scope: ScriptScope, forwards: list[ast.Call], loop: ast.AST) -> bool:
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
    here = script.once("calls by scope", lambda: _calls_by_scope(script)).get(scope, [])
    for call in (c for c in here if c.lineno < site.lineno):
        function = target_of(call, script)
        around: ast.AST = function if function is not None else call.func
        words = {n.attr for n in ast.walk(around) if isinstance(n, ast.Attribute)}
        if words & {"eval", "train"}:
            return function is not None and not words & {"train", "backward", "step"}
    return False


def _calls_by_scope(script: Script) -> dict[ScriptScope, list[ast.Call]]:
    """The calls of every function, the lowest first."""
    found: dict[ScriptScope, list[ast.Call]] = {}
    for calls in list(script.calls.values()):
        for call in calls:
            found.setdefault(script.scope_of(call), []).append(call)
    return {scope: sorted(calls, key=lambda c: -c.lineno) for scope, calls in found.items()}
