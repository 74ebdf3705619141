"""SS404 where the data is set up: a loader for validation that is made from the training data."""

import ast
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.hit import Hit
from steadystep.lint.names import last, name_of
from steadystep.lint.rules.passes import HELD_OUT, TRAIN
from steadystep.lint.script import Script

HELD_OUT_DATA = "val_loss = evaluate(model, val_loader)   # data that is not trained on"
"""What it should look like."""

_SPLITS = ("random_split", "Subset", "SubsetRandomSampler", "train_test_split", "KFold", "StratifiedKFold")


def data_name(node: ast.expr) -> str:
    """`train_loader`, and `train` of `loaders["train"]`."""
    key = getattr(node.slice, "value", None) if isinstance(node, ast.Subscript) else None
    return key if isinstance(key, str) else last(name_of(node))


def by_loader(context: Context) -> Iterator[Hit]:
    """`val_loader = DataLoader(train_set)`, also as an entry of a table."""
    script = context.script
    for call in script.calls.get("DataLoader", ()):
        source = last(name_of(call.args[0])) if call.args else ""
        target = _label(script, call)
        if any(k.arg and "sampler" in k.arg for k in call.keywords) or not HELD_OUT.search(target):
            continue
        if not TRAIN.search(source) or HELD_OUT.search(source) or TRAIN.search(target):
            continue
        if context.mentions(*_SPLITS) and not _other_half_unused(script, source, call):
            continue
        yield hit("SS404", call, f"{target} is made from {source}", snippet=HELD_OUT_DATA)


def _label(script: Script, call: ast.Call) -> str:
    """What a loader is called: by assignment, as an entry, or where it is given by name."""
    parent = script.parents.get(call)
    if isinstance(parent, ast.Assign):
        return last(name_of(parent.targets[0])) or _key(parent.targets[0])
    if isinstance(parent, ast.Dict):
        keys = [k for k, v in zip(parent.keys, parent.values, strict=True) if v is call]
        return str(getattr(keys[0], "value", "")) if keys else ""
    return parent.arg or "" if isinstance(parent, ast.keyword) else ""


def _key(target: ast.expr) -> str:
    return str(getattr(target.slice, "value", "")) if isinstance(target, ast.Subscript) else ""


def _other_half_unused(script: Script, source: str, call: ast.Call) -> bool:
    """`train_set, val_set = random_split(...)`, and nothing but a length is asked of the second."""
    scope = script.scope_of(call)
    for stmt, _ in script.assigned.get((scope, source), ()):
        target = stmt.targets[0] if isinstance(stmt, ast.Assign) else None
        names = [name_of(t) for t in target.elts] if isinstance(target, ast.Tuple) else []
        for other in (n for n in names if HELD_OUT.search(n)):
            uses = [
                n for n in script.nodes if isinstance(n, ast.Name) and n.id == other and isinstance(n.ctx, ast.Load)
            ]
            if all(_asks_length(script, use) for use in uses):
                return True
    return False


def _asks_length(script: Script, node: ast.Name) -> bool:
    parent = script.parents.get(node)
    return isinstance(parent, ast.Call) and name_of(parent.func) == "len"


def by_trainer(context: Context) -> Iterator[Hit]:
    """Training data that a trainer is told to evaluate on."""
    script = context.script
    for node in script.nodes:
        if isinstance(node, ast.keyword) and node.arg in ("eval_dataset", "val_dataloaders", "validation_data"):
            name = data_name(node.value)
            if TRAIN.search(name) and not HELD_OUT.search(name):
                yield hit("SS404", node, f"{node.arg} is {name}", snippet=HELD_OUT_DATA)
    for call in script.calls.get("fit", ()):
        given = [data_name(a) for a in call.args]
        if len(given) == 3 and given[1] == given[2] and TRAIN.search(given[2]):
            yield hit("SS404", call, f"validation is on {given[2]} too", snippet=HELD_OUT_DATA)
    for title in ("val_dataloader", "test_dataloader"):
        for function in script.functions.get(title, ()):
            for made in (n for n in ast.walk(function) if isinstance(n, ast.Return) and isinstance(n.value, ast.Call)):
                source = data_name(made.value.args[0]) if isinstance(made.value, ast.Call) and made.value.args else ""
                if TRAIN.search(source) and not HELD_OUT.search(source):
                    yield hit("SS404", made, f"{title} gives {source}", snippet=HELD_OUT_DATA)
