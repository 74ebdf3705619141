"""Which calls run a network, and which expressions make one."""

import ast
import re

from steadystep.lint.bindings import parameters, passed
from steadystep.lint.names import last, looks_like_model, name_of, path_of
from steadystep.lint.script import Script
from steadystep.lint.sources import named_sources, sources

_LISTS = ("modules", "named_modules", "parameters", "children", "named_children")
_PREPARES = re.compile(r"(tokeni[sz]er|processor|feature_?extractor|collator|config)(_?(class|cls|fast))?$", re.I)
"""Classes of what makes a batch, not of what runs on it."""


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
