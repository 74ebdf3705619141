"""SS604 with several optimizers: one network is held by two of them, and another by none."""

import ast
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.hit import Hit
from steadystep.lint.modules import is_model_call, makes_module
from steadystep.lint.names import last, name_of, path_of
from steadystep.lint.rules.loss import under_no_grad
from steadystep.lint.rules.shared_networks import by_identity, matches
from steadystep.lint.script import Script

_FROZEN = ("eval", "requires_grad_", "load_state_dict", "half")

Held = tuple[ast.Call, str, list[str]]


def check(context: Context) -> Iterator[Hit]:
    """For every network that two optimizers share."""
    told = list(_by_name(context))
    yield from told or by_identity(context)


def _by_name(context: Context) -> Iterator[Hit]:
    held = _held(context)
    if len(held) < 2:
        return
    known = [network for _, _, networks in held for network in networks]
    for made, optimizer, networks in held:
        shared = [n for n in networks if known.count(n) > 1]
        for network in shared:
            for missing in _in_no_optimizer(context, made, known):
                if _belongs(context, made, optimizer, networks, missing) and not matches(optimizer, network):
                    yield _tell(context, made, network, missing)
                    return


def _held(context: Context) -> list[Held]:
    """(call, name, networks) of every optimizer; nothing when one of them is not known, for it may hold any."""
    script, found = context.script, list[Held]()
    for calls in list(script.calls.values()):
        for call in calls:
            if not context.roles.is_optimizer(call):
                continue
            networks = context.roles.networks_of(call)
            stmt = script.stmt_of(call)
            if networks is None or not isinstance(stmt, ast.Assign) or stmt.value is not call:
                return []
            found.append((call, path_of(stmt.targets[0]), networks))
    return found


def _in_no_optimizer(context: Context, optimizer: ast.Call, known: list[str]) -> list[str]:
    """Networks made next to the optimizer that are run with gradients and that nothing freezes, copies or wraps."""
    script, scope = context.script, context.script.scope_of(optimizer)
    found = []
    for (where, name), assigned in list(script.assigned.items()):
        if where is not scope or name in known or any(name.startswith(f"{n}.") for n in known):
            continue
        if (
            all(_is_new(script, value) for _, value in assigned)
            and _is_run(script, name)
            and not _is_still(script, name)
        ):
            found.append(name)
    return found


def _is_new(script: Script, value: ast.expr) -> bool:
    """Made here: a network of torch or of this file, what a function of this file makes, or some other class."""
    maker = last(_maker(value))
    return makes_module(value, script) or maker in script.functions or maker[:1].isupper()


def _maker(value: ast.expr) -> str:
    """`make` of `make(3).to(device)`."""
    while (
        isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and isinstance(value.func.value, ast.Call)
    ):
        value = value.func.value
    return name_of(value.func) if isinstance(value, ast.Call) else ""


def _is_run(script: Script, name: str) -> bool:
    calls = script.calls.get(last(name), ())
    return any(name_of(c.func) == name and not under_no_grad(script, c) and script.loops_of(c) for c in calls) or (
        name.startswith("self.") and any(name_of(c.func) == name and is_model_call(c, script) for c in calls)
    )


def _is_still(script: Script, name: str) -> bool:
    """Frozen, a copy of another, or given to somebody who may hold its parameters."""
    for node in script.nodes:
        if isinstance(node, ast.Call):
            owner, _, method = name_of(node.func).rpartition(".")
            if owner == name and method in (*_FROZEN, "parameters", "named_parameters", "apply"):
                return method != "apply"
            if name in {name_of(a) for a in (*node.args, *(k.value for k in node.keywords))}:
                return True
    return False


def _belongs(context: Context, made: ast.Call, optimizer: str, networks: list[str], missing: str) -> bool:
    """It was made like another network of this optimizer, or the optimizer has its name."""
    script = context.script
    maker = {_maker(v) for v in script.values(missing, made)}
    others = {_maker(v) for n in networks for v in script.values(n, made)}
    likes = {n for n in networks if maker & {_maker(v) for v in script.values(n, made)}}
    return (bool(maker & others - {""}) and len(likes) < len(networks)) or matches(optimizer, missing)


def _tell(context: Context, made: ast.Call, network: str, missing: str) -> Hit:
    wrong = [n for n in ast.walk(made) if isinstance(n, ast.Name | ast.Attribute) and path_of(n) == network]
    diff = context.edit().replace(wrong[0], missing).diff() if wrong else ""
    message = f"{network} is given to two optimizers and {missing} to none"
    return hit("SS604", made, message, diff=diff)
