"""SS604 with several optimizers: one network is held by two of them, and another by none."""

import ast
import re
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.names import last, name_of, path_of
from steadystep.lint.networks import Network, is_model_call, makes_module, network_identity, networks_of, related
from steadystep.lint.report import Hit
from steadystep.lint.rules.loss import under_no_grad
from steadystep.lint.script import Script

_OPTIMIZER_WORDS = re.compile(r"optimizers?|optim|opts?|solver", re.I)

HeldNetworks = tuple[str, ast.AST, list[Network]]
_FROZEN = ("eval", "requires_grad_", "load_state_dict", "half")
_TRAINED = frozenset({"train", "state_dict"})
HeldNames = tuple[ast.Call, str, list[str]]


def by_identity(context: Context) -> Iterator[Hit]:
    """The optimizer that is named after the network nobody has."""
    script, held = context.script, _optimizers(context)
    if held is None or len(held) < 2:
        return
    everything = [network for _, _, networks in held for network in networks]
    missing = [n for n in _run(context) if all(related(script, n, other) is False for other in everything)]
    for label, place, networks in held:
        for network in networks:
            mine = network_identity(script, network)
            holders = {o for o, _, ns in held if any(mine and mine == network_identity(script, n) for n in ns)}
            twice = len(holders) > 1  # by name: an option may choose the kind of one optimizer
            for other in missing if twice and not matches(label, network.path) else ():
                if matches(label, other.path) and not _is_frozen(script, other):
                    message = f"{network.path} is given to two optimizers and {other.path} to none"
                    yield hit("SS604", place, message, snippet=f"{label} = torch.optim.Adam({other.path}.parameters())")
                    return


def _optimizers(context: Context) -> list[HeldNetworks] | None:
    """Every optimizer that has a name or a key; None when one of them is not known, for it may hold any network."""
    script, found = context.script, list[HeldNetworks]()
    seen = 0
    for name, assigned in list(script.named.items()):
        for stmt, value in assigned:
            entries = [(name, value)]
            if isinstance(value, ast.Dict) and all(isinstance(k, ast.Constant) for k in value.keys):
                entries = [(f"{name}[{k.value!r}]", v) for k, v in zip(value.keys, value.values, strict=True)]  # type: ignore[union-attr]
            for label, made in entries:
                if context.roles.of(label, stmt) != "optimizer" or not isinstance(made, ast.Call):
                    continue
                networks = networks_of(script, context.roles, label, made)
                if networks is None:
                    return None
                seen += context.roles.is_optimizer(made)
                found.append((label, made, networks))
    every = sum(context.roles.is_optimizer(c) for calls in list(script.calls.values()) for c in calls)
    return found if seen == every or seen == 0 else None


def _run(context: Context) -> list[Network]:
    """Networks that run with gradients where something is trained."""
    loops = {cycle.loop for cycle in context.cycles}
    run = [e for e in context.events("forward") if not e.no_grad and loops & {None, *e.loops}]
    return list({(e.local, context.script.scope_of(e.node)): Network(e.local, e.node) for e in run}.values())


def _is_frozen(script: Script, network: Network) -> bool:
    called = {method for method in (*_FROZEN, *_TRAINED) if _is_asked(script, network, method)}
    # why: what is put back into training mode, or saved, is trained
    return "requires_grad_" in called or bool(called & {"eval", "load_state_dict"} and not called & _TRAINED)


def _is_asked(script: Script, network: Network, method: str) -> bool:
    """Whether a method of it is called somewhere."""
    mine = network_identity(script, network)
    for call in script.calls.get(method, ()):
        owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        if mine & network_identity(script, Network(owner.replace('"', "'"), call)):
            return True
    return False


def matches(optimizer: str, network: str) -> bool:
    """`opt_d` and `D`, `netD` or `disc`; `critic_optimizer` and `critic`; `opts["d"]` and `nets["d"]`."""
    word = _OPTIMIZER_WORDS.sub("", _leaf(optimizer)).strip("_").lower()
    plain = re.sub(r"^net_?|_?(net|network|model)$", "", _leaf(network), flags=re.I).strip("_").lower()
    begins = any(part.startswith(word) for part in (plain, *plain.split("_")))
    return bool(word) and (begins or word.startswith(plain or "?"))


def _leaf(path: str) -> str:
    return path[:-1].rpartition("[")[2].strip("'") if path.endswith("]") else last(path)


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
        # why: by name, for an option may choose the kind of one optimizer
        shared = [n for n in networks if len({name for _, name, others in held if n in others}) > 1]
        for network in shared:
            for missing in _in_no_optimizer(context, made, known):
                if _belongs(context, made, optimizer, networks, missing) and not matches(optimizer, network):
                    yield _tell(context, made, network, missing)
                    return


def _held(context: Context) -> list[HeldNames]:
    """(call, name, networks) of every optimizer; nothing when one of them is not known, for it may hold any."""
    script, found = context.script, list[HeldNames]()
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
            and not _is_frozen(script, Network(name, assigned[0][1]))
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
            if owner == name and method in ("requires_grad_", "half", "parameters", "named_parameters", "apply"):
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
