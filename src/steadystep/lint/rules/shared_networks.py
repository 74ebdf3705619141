"""SS604 with optimizers in a table, or made by a function: one network has two of them, and another has none."""

import ast
import re
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.hit import Hit
from steadystep.lint.names import last
from steadystep.lint.networks import Network, identity, networks_of, related
from steadystep.lint.script import Script

_OPTIMIZER_WORDS = re.compile(r"optimizers?|optim|opts?|solver", re.I)

Held = tuple[str, ast.AST, list[Network]]


def by_identity(context: Context) -> Iterator[Hit]:
    """The optimizer that is named after the network nobody has."""
    script, held = context.script, _optimizers(context)
    if held is None or len(held) < 2:
        return
    everything = [network for _, _, networks in held for network in networks]
    missing = [n for n in _run(context) if all(related(script, n, other) is False for other in everything)]
    for label, place, networks in held:
        for network in networks:
            mine = identity(script, network)
            twice = sum(any(mine and mine == identity(script, n) for n in ns) for _, _, ns in held) > 1
            for other in missing if twice and not matches(label, network.path) else ():
                if matches(label, other.path) and not _is_frozen(script, other):
                    message = f"{network.path} is given to two optimizers and {other.path} to none"
                    yield hit("SS604", place, message, snippet=f"{label} = torch.optim.Adam({other.path}.parameters())")
                    return


def _optimizers(context: Context) -> list[Held] | None:
    """Every optimizer that has a name or a key; None when one of them is not known, for it may hold any network."""
    script, found = context.script, list[Held]()
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
    mine = identity(script, network)
    for method in ("requires_grad_", "eval", "load_state_dict"):
        for call in script.calls.get(method, ()):
            owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
            if mine & identity(script, Network(owner.replace('"', "'"), call)):
                return True
    return False


def matches(optimizer: str, network: str) -> bool:
    """`opt_d` and `D`, `netD` or `disc`; `critic_optimizer` and `critic`; `opts["d"]` and `nets["d"]`."""
    word = _OPTIMIZER_WORDS.sub("", _leaf(optimizer)).strip("_").lower()
    plain = re.sub(r"^net_?|_?(net|network|model)$", "", _leaf(network), flags=re.I).strip("_").lower()
    return bool(word) and (plain.startswith(word) or word.startswith(plain or "?"))


def _leaf(path: str) -> str:
    return path[:-1].rpartition("[")[2].strip("'") if path.endswith("]") else last(path)
