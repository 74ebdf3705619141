"""In which mode a function evaluates, and with gradients or not; SS403: eval() in a training loop, and never back."""

import ast
import re
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.control import is_no_grad
from steadystep.lint.events import EnteredLoop, Event
from steadystep.lint.names import chained, last, name_of, path_of
from steadystep.lint.networks import is_model_call, is_module_class, makes_module
from steadystep.lint.report import Hit
from steadystep.lint.rules.passes import put_into_eval_before
from steadystep.lint.script import Function, Script, ScriptScope
from steadystep.lint.sources import named_sources
from steadystep.lint.targets import target_of

_RANDOM_LAYERS = re.compile(
    r"drop_?out|batch_?norm|instance_?norm|drop_?path|stochastic_?depth|Transformer(En|De)coderLayer|nn\.Transformer\(",
    re.I,
)

_SETS_MODE = re.compile(
    r"(^|_)(eval|train|training|test|inference)_?modes?$|^_?(set|to|switch|toggle|change)_?(eval|train\w*|modes?|test)$"
    r"|^(evaluating|as_eval|set_modes?_\w+|average_parameters|ema_scope)$",
    re.I,
)
_GRADIENTS = frozenset(
    ["grad", "requires_grad_", "requires_grad", "jacobian", "hessian", "jacrev", "jacfwd", "vjp", "jvp", "attribute"]
)


def no_grad_around(script: Script, node: ast.AST) -> bool:
    """Whether gradients are off at a node: a `with`, a decorator, or a switch anywhere in the file."""
    withs = [a for a in script.ancestors(node) if isinstance(a, ast.With | ast.AsyncWith)]
    # why all of it: `with (torch.enable_grad() if training else torch.no_grad()):`
    if any(is_no_grad(part) for w in withs for item in w.items for part in ast.walk(item.context_expr)):
        return True
    scope = script.scope_of(node)
    while scope is not None:
        if any(is_no_grad(d) for d in scope.decorator_list):
            return True
        scope = script.scope_of(scope)
    return bool(script.calls.get("set_grad_enabled"))


def is_before_no_grad(script: Script) -> bool:
    """Written for torch before 0.4: `volatile=True` switched the graph off, and `loss.data[0]` read the number."""
    said = any(isinstance(n, ast.keyword) and n.arg == "volatile" for n in script.nodes)
    return said and any(
        isinstance(n, ast.Subscript) and isinstance(n.value, ast.Attribute) and n.value.attr == "data"
        for n in script.nodes
    )


def sets_mode(script: Script, scope: ScriptScope) -> str:
    """`eval`, `train` or nothing: what is called in the same function or in one around it."""
    owner: ast.AST = scope if scope is not None else script.tree
    called = [n for n in ast.walk(owner) if isinstance(n, ast.Call)]
    if any(isinstance(n.func, ast.Attribute) and n.func.attr == "eval" and not n.args for n in called):
        return "eval"
    if any(_switches(script, call) for call in called if scope is not None or script.scope_of(call) is None):
        return "train"
    if any(
        isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "train" and n.args
        for n in ast.walk(owner)
    ):
        return "train"
    outer = script.scope_of(scope) if scope is not None else None
    return sets_mode(script, outer) if outer is not None else ""


def _switches(script: Script, call: ast.Call) -> bool:
    """A call that sets the mode of what it is given, or of all: `self.mode(False)`, `set_mode(model, "eval")`."""
    function = target_of(call, script)
    if function is None:
        leaf = call.func.attr if isinstance(call.func, ast.Attribute) else name_of(call.func)
        return bool(_SETS_MODE.search(leaf)) and not is_no_grad(call)
    nodes = list(ast.walk(function))
    words = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    asked = any(isinstance(n, ast.Call) and _is_asked_for(n) for n in nodes)
    return (asked or bool(words & {"eval", "train", "training"})) and not words & {"backward", "step"}


def may_switch(script: Script, node: ast.AST) -> bool:
    """Whether something in it may set a mode, other than by a plain eval() or train()."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr == "training" and isinstance(part.ctx, ast.Store):
            return True
        if isinstance(part, ast.Call) and target_of(part, script) is None and _switches(script, part):
            return True
        if isinstance(part, ast.Call) and _is_asked_for(part):
            return True
        if isinstance(part, ast.Lambda) and "train" in {n.attr for n in ast.walk(part) if isinstance(n, ast.Attribute)}:
            return True
    return False


def _is_asked_for(call: ast.Call) -> bool:
    """`getattr(net, mode)`: a method whose name the file does not tell."""
    named = len(call.args) > 1 and isinstance(call.args[1], ast.Constant)
    return (name_of(call.func) == "getattr" and not named) or last(name_of(call.func)) == "methodcaller"


def stays_in_eval(script: Script, forward: ast.Call) -> bool:
    """A network that is put into eval mode once, wherever, and never back: the average of another, a teacher."""
    name = last(name_of(forward.func))
    owners = {
        mode: {last(name_of(c.func.value)) for c in script.calls.get(mode, ()) if isinstance(c.func, ast.Attribute)}
        for mode in ("eval", "train")
    }
    made = [v for n, assigned in script.named.items() if last(n) == name for _, v in assigned]
    in_eval = any(isinstance(c, ast.Call) and last(ast.unparse(c.func)) == "eval" for v in made for c in ast.walk(v))
    full = {name_of(c.func.value) for c in script.calls.get("train", ()) if isinstance(c.func, ast.Attribute)}
    mine = name_of(forward.func)  # `self.model` of an average is not the `model` that is trained
    trained = mine in full or (name in owners["train"] and not mine.startswith("self."))
    return (name in owners["eval"] or in_eval) and not trained


def evaluated_here(script: Script, scope: ScriptScope, forward: ast.Call) -> bool:
    """`model.eval()` and then `model(x)` in one function, of one that a function of this file, or the loop, trains."""
    called = name_of(forward.func)
    switches = [n for name in ("eval", "train") for n in script.calls.get(name, ()) if script.scope_of(n) is scope]
    before = [n for n in switches if n.lineno < forward.lineno and isinstance(n.func, ast.Attribute)]
    # why any name for train(): `for net in nets: net.train()` may be about this one too
    last_one = max(before, key=lambda n: n.lineno, default=None)
    if last_one is None or not isinstance(last_one.func, ast.Attribute) or last_one.func.attr != "eval":
        return False
    around = {scope or script.tree, *script.ancestors(forward)}
    switched = {
        name_of(n.func.value)
        for n in before
        if isinstance(n.func, ast.Attribute)
        and n.func.attr == "eval"
        and script.parents.get(script.stmt_of(n)) in around  # not in an arm of an `if` that may be the other one
    }
    trained = {
        last(name_of(c.func.value)) for c in script.calls.get("parameters", ()) if isinstance(c.func, ast.Attribute)
    }
    return called in switched and last(called) in trained


def callers_set_no_mode(script: Script, scope: ScriptScope, seen: set[Function]) -> bool:
    """True when every caller is in this file and none of them calls eval()."""
    if scope is None:
        return True
    sites = [c for c in script.calls.get(scope.name, ()) if script.scope_of(c) is not scope]
    if not sites or scope in seen:
        return False
    seen.add(scope)
    if any(put_into_eval_before(script, site) for site in sites):
        return False
    callers = {script.scope_of(site) for site in sites}
    for caller in callers:
        if sets_mode(script, caller) == "eval":
            return False
        called = caller is not None and any(script.scope_of(c) is not caller for c in script.calls.get(caller.name, ()))
        if called and not callers_set_no_mode(script, caller, seen):
            return False
    return True


def called_quietly(script: Script, scope: ScriptScope) -> bool:
    """Whether a caller has switched gradients off."""
    return scope is not None and any(no_grad_around(script, c) for c in script.calls.get(scope.name, ()))


def wants_gradients(script: Script, scope: ScriptScope, at: ast.AST) -> bool:
    """Whether a function, or a statement of the module, works with gradients itself, as an attack does."""
    owner: ast.AST = scope if scope is not None else _top(script, at)
    for node in ast.walk(owner):
        if isinstance(node, ast.Attribute | ast.Name) and last(name_of(node)) in _GRADIENTS:
            return True
        if isinstance(node, ast.Attribute) and node.attr in _GRADIENTS:
            return True
        if isinstance(node, ast.keyword) and node.arg in ("requires_grad", "create_graph"):
            return True
    return False


def _top(script: Script, node: ast.AST) -> ast.AST:
    while not isinstance(script.parents.get(node, script.tree), ast.Module):
        node = script.parents[node]
    return node


def mode_matters(script: Script, forward: ast.Call) -> bool:
    """Unless the whole network is in the file and has no layer that behaves differently."""
    path = path_of(forward.func)
    local = _is_local(script, path, forward) or _is_local(script, path.rpartition(".")[0], forward)  # a method of it
    if script.linked.lines and not is_model_call(forward, script):
        return bool(_RANDOM_LAYERS.search(script.text))  # a method of another file runs it
    return _may_differ(script) if local else True


def _may_differ(script: Script) -> bool:
    inherits = any(is_module_class(c, script) and len(c.bases) > 1 for c in script.classes.values())
    return inherits or bool(_RANDOM_LAYERS.search(script.text))


def _is_local(script: Script, path: str, at: ast.AST) -> bool:
    """Whether every value of a name is a network that this file makes, or that one on another device."""
    values = [v for v, _ in named_sources(script, path, at)] if path else []
    made = [v for v in values if not (isinstance(v, ast.Call) and path_of(chained(v)) == path)]
    return bool(made) and all(makes_module(v, script) for v in made)


def check_left_in_eval(context: Context) -> Iterator[Hit]:
    """eval() in the loop that also trains, and no train() in it."""
    trained = {last(e.owner) for e in context.events("train", "mode")}
    for root in context.roots:
        for event in root:
            if event.kind == "eval" and event.loops and not event.last_round:
                yield from _not_back(context, root, event, trained)


def _not_back(context: Context, root: tuple[Event, ...], event: Event, trained: set[str]) -> Iterator[Hit]:
    loop = next((around for around in reversed(event.loops) if _steps_in(root, around)), None)
    if loop is None or any(e.kind in ("train", "mode") and loop in e.loops for e in root):
        return
    step = _steps_in(root, loop)[0]
    made = context.roles.optimizer_call(step.local if step.kind == "step" else step.subject, step.node)
    if last(event.owner) not in trained and _goes_back_after(context, event):
        return  # trained in eval mode on purpose: a head on frozen features
    if made is not None and loop.node in context.script.ancestors(made):
        return  # each pass trains a new network: a search over settings
    model = context.roles.model_of(made) if made is not None else ""
    if last(event.owner) not in trained and last(event.owner) != last(model):
        return
    if any(e.kind in ("guard", "opaque") and loop in e.loops for e in root) or may_switch(context.script, loop.node):
        return
    if _is_local(context.script, event.local, event.node) and not _may_differ(context.script):
        return  # no layer behaves differently
    diff = ""
    first = loop.body[0] if loop.body else event.stmt
    if loop.body and context.script.scope_of(event.node) is context.script.scope_of(first):
        diff = context.edit().put_before(first, f"{event.local}.train()").diff()
    snippet = f"{event.local}.train()   # at the start of each epoch, or right after the evaluation"
    yield hit("SS403", event.node, f"{event.owner}.train() is not called again after this", diff=diff, snippet=snippet)


def _goes_back_after(context: Context, event: Event) -> bool:
    """A function that switches this network to eval mode trains in it, further down."""
    script = context.script
    backwards = [(script.scope_of(e.node), e.line) for e in context.events("backward")]
    for switch in (e for e in context.events("eval") if last(e.owner) == last(event.owner)):
        scope = script.scope_of(switch.node)
        if scope is not None and any(place is scope and line > switch.line for place, line in backwards):
            return True
    return False


def _steps_in(root: tuple[Event, ...], loop: EnteredLoop) -> list[Event]:
    return [e for e in root if e.kind in ("step", "scaler-step") and loop in e.loops]
