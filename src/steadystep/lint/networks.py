"""Which network is which: by what it was made from, whatever it is called in this function or in that."""

import ast
import re
from dataclasses import dataclass
from typing import final

from steadystep.lint.names import last, looks_like_model, name_of, parameters, passed, path_of
from steadystep.lint.roles import Roles
from steadystep.lint.script import Bound, Script
from steadystep.lint.sources import maker_of, named_sources, sources, without_wrappers

_DEEPEST = 6
_COPIES = ("deepcopy", "copy", "AveragedModel", "EMA", "ExponentialMovingAverage", "ModelEMA", "ModelEmaV2")
"""What these make has parameters of its own."""

_LISTS = ("modules", "named_modules", "parameters", "children", "named_children")
_PREPARES = re.compile(r"(tokeni[sz]er|processor|feature_?extractor|collator|config)(_?(class|cls|fast))?$", re.I)
"""Classes of what makes a batch, not of what runs on it."""


@final
@dataclass(frozen=True, slots=True)
class Network:
    """A network by a name at a place."""

    path: str
    at: ast.AST


def networks_of(script: Script, roles: Roles, name: str, at: ast.AST) -> list[Network] | None:
    """Whose parameters the optimizer of that name holds; None when the file does not tell."""
    bound = list(dict.fromkeys(script.bound(name, at)))
    if not bound and name.endswith("]"):
        return _of_entry(script, roles, name, at)
    return _of_value(script, roles, *bound[0], 0) if len(bound) == 1 else None


def _of_entry(script: Script, roles: Roles, name: str, at: ast.AST) -> list[Network] | None:
    """`opts["g"]` of `{k: Adam(net.parameters()) for k, net in nets.items()}`."""
    base, _, key = name[:-1].rpartition("[")
    made = [v for v, _ in named_sources(script, base, at)]
    table = made[0] if len(made) == 1 else None
    if (
        not isinstance(table, ast.DictComp)
        or not isinstance(table.value, ast.Call)
        or not roles.is_optimizer(table.value)
    ):
        return None
    first, over = table.generators[0], table.generators[0].iter
    names = [n.id for n in ast.walk(first.target) if isinstance(n, ast.Name)]
    items = isinstance(over, ast.Call) and isinstance(over.func, ast.Attribute) and over.func.attr == "items"
    nets = (
        path_of(over.func.value)
        if items and isinstance(over, ast.Call) and isinstance(over.func, ast.Attribute)
        else ""
    )
    params = table.value.args[0] if table.value.args else None
    inner = params.func.value if isinstance(params, ast.Call) and isinstance(params.func, ast.Attribute) else None
    if nets and len(names) == 2 and path_of(inner) == names[1]:
        return [Network(f"{nets}[{key}]", table)]
    if isinstance(inner, ast.Subscript) and isinstance(inner.slice, ast.Name) and inner.slice.id == names[0]:
        return [Network(f"{path_of(inner.value)}[{key}]", table)]
    return None


def network_identity(script: Script, network: Network) -> frozenset[Bound]:
    """What it was made from; empty when the file does not tell."""
    key = ("identity", network.path, network.at)
    if key not in script.memo:
        script.memo[key] = frozenset(named_sources(script, network.path, network.at, enter=False))
    found: frozenset[Bound] = script.memo[key]
    return found


def related(script: Script, a: Network, b: Network) -> bool | None:
    """Whether they are one, or one is a part of the other; None when the file does not tell."""
    if a.path == b.path and script.scope_of(a.at) is script.scope_of(b.at):
        return True
    ours, theirs = _whole(script, a), _whole(script, b)
    if any(ours[0] & other for other in theirs) or any(theirs[0] & other for other in ours):
        return True
    if not ours[0] or not theirs[0] or not all(_is_made(v) for v, _ in ours[0] | theirs[0]):
        return None
    if _attached(script, a, theirs) or _attached(script, b, ours):
        return True
    return _goes_into(script, ours[0], theirs) or _goes_into(script, theirs[0], ours)


def _attached(script: Script, network: Network, others: list[frozenset[Bound]]) -> bool:
    """`model.head = head`."""
    given = script.once("given to parts", lambda: _given_to_parts(script))
    for value in given.get(network.path, ()):
        inner = frozenset(named_sources(script, path_of(value), value, enter=False))
        if any(inner & other for other in others):
            return True
    return False


def _given_to_parts(script: Script) -> dict[str, list[ast.expr]]:
    """By everything before a dot in a name that is assigned to: `head` by `model` for `model.head = head`."""
    found: dict[str, list[ast.expr]] = {}
    for name, assigned in script.named.items():
        values = [value for _, value in assigned if path_of(value)]
        for place, letter in enumerate(name):
            if letter == "." and values:
                found.setdefault(name[:place], []).extend(values)
    return found


def _whole(script: Script, network: Network) -> list[frozenset[Bound]]:
    """The identities of a network and of everything it is written as a part of."""
    found, path = [network_identity(script, network)], network.path
    while "." in path or "[" in path:
        path = path[: max(path.rfind("."), path.rfind("["))]
        if path not in ("self", "cls"):
            found.append(network_identity(script, Network(path, network.at)))
    return found


def _is_made(value: ast.expr) -> bool:
    return isinstance(value, ast.Call)


def _goes_into(script: Script, made: frozenset[Bound], others: list[frozenset[Bound]]) -> bool:
    """One was made from the other: a wrapper, a copy, a network of networks."""
    for value, _ in made:
        if isinstance(value, ast.Call) and last(name_of(value.func)) in _COPIES:
            continue
        inside = _inside(script, value)
        if any(not inside.isdisjoint(other) for other in others):
            return True
    return False


def _inside(script: Script, value: ast.expr) -> frozenset[Bound]:
    """Every expression within one, and what the names in it were made from."""
    key = ("inside", value)
    if key not in script.memo:
        found: set[Bound] = set()
        for part in ast.walk(value):
            if isinstance(part, ast.Name | ast.Attribute | ast.Subscript) and path_of(part):
                found.update(named_sources(script, path_of(part), part, enter=False))
            if part is not value and isinstance(part, ast.expr):
                found.add((part, None))
        script.memo[key] = frozenset(found)
    inside: frozenset[Bound] = script.memo[key]
    return inside


def _of_value(script: Script, roles: Roles, value: ast.expr, part: int | None, depth: int) -> list[Network] | None:
    if depth > _DEEPEST:
        return None
    if path_of(value):
        inner = list(dict.fromkeys(script.bound(path_of(value), value)))
        return _of_value(script, roles, inner[0][0], inner[0][1], depth + 1) if len(inner) == 1 else None
    if isinstance(value, ast.Tuple | ast.List) and part is not None and part < len(value.elts):
        return _of_value(script, roles, value.elts[part], None, depth + 1)
    if not isinstance(value, ast.Call):
        return None
    if roles.is_optimizer(value):
        names = roles.networks_of(value)
        return None if names is None else [Network(name, value) for name in names]
    inner_value = without_wrappers(script, value, part)
    if inner_value is not None:
        return _of_value(script, roles, inner_value, None, depth + 1)
    return _of_maker(script, roles, value, part, depth)


def _of_maker(script: Script, roles: Roles, call: ast.Call, part: int | None, depth: int) -> list[Network] | None:
    """`make_opt(net)`: a function or a lambda of this file, its parameters as the caller calls them."""
    made = [v for v in script.values(path_of(call.func), call) if isinstance(v, ast.Lambda)]
    function = maker_of(script, call) if not made else None
    if made:
        names, given = [a.arg for a in made[0].args.args], made[0].body
    elif function is not None:
        returns = [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None]
        if len(returns) != 1:
            return None
        names, given = parameters(function), returns[0]
        names = names[1:] if names[:1] in (["self"], ["cls"]) else names
    else:
        return None
    found = _of_value(script, roles, given, part, depth + 1)
    return None if found is None else [_renamed(network, names, call) for network in found]


def _renamed(network: Network, names: list[str], call: ast.Call) -> Network:
    head, dot, rest = network.path.partition(".")
    if head not in names:
        return network
    given = passed(call, names.index(head), head)
    return Network(path_of(given) + dot + rest, call) if given is not None and path_of(given) else network


def is_model_call(call: ast.Call, script: Script) -> bool:
    """`model(x)`: a call of something that is a network by its name or by how it was made."""
    if isinstance(call.func, ast.Subscript):
        return _is_entry(call.func, script)
    name = name_of(call.func).removesuffix(".forward")
    if (
        not name
        or name in ("self", "cls")
        or name.partition(".")[0] in script.imports
        or last(name) in _LISTS
        or last(name) in script.functions
        or last(name) in script.classes
    ):
        return False
    if looks_like_model(name):
        return not _prepares_data(script, name, call)
    if name in _used_as_networks(script):
        return True
    values = script.values(name, call)
    if any(makes_module(value, script) for value in values):
        return True
    followed = [v for value in values if path_of(value) for v, _ in sources(script, value)]
    return any(makes_module(value, script) for value in followed)


def _prepares_data(script: Script, name: str, at: ast.AST) -> bool:
    """`encoder = AutoTokenizer.from_pretrained(...)`, whatever it is called."""
    values = [v for v, _ in named_sources(script, name, at) if isinstance(v, ast.Call)]
    makers = [script.full(v.func).removesuffix(".from_pretrained") for v in values]
    return bool(makers) and all(_PREPARES.search(last(maker)) for maker in makers)


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
