"""SS504: parameters that were sorted out to have no weight decay, and have it all the same."""

import ast
import re
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.names import argument, calls_in, last, name_of, path_of
from steadystep.lint.numbers import number_at
from steadystep.lint.report import Hit
from steadystep.lint.script import Script
from steadystep.lint.sources import maker_of, sources

SPARED = re.compile(r"no_?(weight_?)?decay|without_?decay|undecayed|nodecay|no_wd", re.I)
NORM = re.compile(r"(^|_)(layer|batch|group|rms)?_?norms?(_|$|\d)|(^|_)(ln|bn)s?(_|$|\d)|(^|_)bias(es)?(_|$)", re.I)
_DECAYED = re.compile(r"decay|(^|_)wd(_|$)|regulari[sz]ed", re.I)
_NORM_LAYERS = re.compile(r"^(Layer|Batch|Group|Instance|RMS|Sync)\w*Norm(1d|2d|3d)?$")
_WEIGHT_LAYERS = ("Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose2d")
_PUTS = ("add", "append", "extend", "update")
_WITHOUT = "(nn.Linear, nn.Conv2d)   # norms belong to the group without decay"
_NORM_IN_TEXT = re.compile(r"norm|(^|[._])(ln|bn)(_|[.\d]|$)|bias", re.I)
_DECAYED_BY_DEFAULT = {"AdamW": 0.01, "Lion": 0.0}


def by_type(context: Context) -> Iterator[Hit]:
    """`isinstance(module, (nn.Linear, nn.LayerNorm))` chooses what goes into the group that is decayed."""
    script = context.script
    if not _is_decayed(context):
        return
    for call in script.calls.get("isinstance", ()):
        listed = (
            [v for v, _ in sources(script, call.args[1]) if isinstance(v, ast.Tuple)] if len(call.args) == 2 else []
        )
        names = {last(name_of(e)) for table in listed for e in table.elts}
        norms = sorted(n for n in names if _NORM_LAYERS.match(n))
        around = next((a for a in script.ancestors(call) if isinstance(a, ast.If)), None)
        if not norms or not names & set(_WEIGHT_LAYERS) or around is None or call not in set(ast.walk(around.test)):
            continue
        if any(isinstance(n, ast.Not) for n in ast.walk(around.test)) or not _puts_into_decayed(around.body):
            continue
        yield hit("SS504", listed[0], f"{norms[0]} is among the layers whose weights are decayed", snippet=_WITHOUT)


def _puts_into_decayed(body: list[ast.stmt]) -> bool:
    owners = [
        name_of(n.func.value)
        for s in body
        for n in ast.walk(s)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in _PUTS
    ]
    return bool(owners) and all(_DECAYED.search(last(o)) and not SPARED.search(last(o)) for o in owners)


def _is_decayed(context: Context) -> bool:
    """Some group of an optimizer has a decay."""
    for node in context.script.nodes:
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            given = [v for k, v in pairs if isinstance(k, ast.Constant) and k.value == "weight_decay"]
            if any((number_at(v, context.script, v) or 0) > 0 for v in given):
                return True
    return False


def by_table(context: Context) -> Iterator[Hit]:
    """`weight_decay=decay[kind]` of a table in which norms, or biases, have a decay of their own."""
    script = context.script
    for node in script.nodes:
        given = node.value if isinstance(node, ast.keyword) and node.arg == "weight_decay" else None
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            given = next((v for k, v in pairs if isinstance(k, ast.Constant) and k.value == "weight_decay"), None)
        if not isinstance(given, ast.Subscript) or isinstance(given.slice, ast.Constant) or not path_of(given.value):
            continue
        for table, _ in sources(script, given.value):
            yield from _in_table(context, script, table)


def _in_table(context: Context, script: Script, table: ast.expr) -> Iterator[Hit]:
    pairs = list(zip(table.keys, table.values, strict=True)) if isinstance(table, ast.Dict) else []
    for key, value in pairs:
        word = str(key.value) if isinstance(key, ast.Constant) else ""
        if NORM.search(word) and (number_at(value, script, value) or 0) > 0 and len(pairs) > 1:
            diff = context.edit().replace(value, "0.0").diff()
            yield hit("SS504", value, f"{word} has its own weight decay", diff=diff, snippet=f'"{word}": 0.0')


def check(context: Context) -> Iterator[Hit]:
    """For every optimizer that is given groups."""
    script = context.script
    yield from by_type(context)
    yield from by_table(context)
    for calls in list(script.calls.values()):
        for call in calls:
            if context.roles.is_optimizer(call):
                groups = groups_of(script, call)
                if len(groups) > 1:
                    yield from (h for g in groups for h in _judge(context, call, g))


def groups_of(script: Script, optimizer: ast.Call) -> list[ast.Dict]:
    """The groups as they are written: in the call, in a list with a name, or in what a function gives back."""
    params, at = argument(optimizer, 0, "params"), script.stmt_of(optimizer)
    for _ in range(3):
        if isinstance(params, ast.Name | ast.Attribute):
            values = {id(v): v for v in script.values(name_of(params), at)}
            params = next(iter(values.values())) if len(values) == 1 else None
        elif isinstance(params, ast.Call):
            made = script.functions.get(last(name_of(params.func)), [])
            returns = [n for f in made[:1] for n in ast.walk(f) if isinstance(n, ast.Return)]
            params, at = (returns[0].value, returns[0]) if len(made) == len(returns) == 1 else (None, at)
    listed = params.elts if isinstance(params, ast.List | ast.Tuple) else []
    return [g for g in map(_written_out, listed) if isinstance(g, ast.Dict)]


def _written_out(group: ast.expr) -> ast.expr:
    """`dict(params=p, lr=1)` as `{"params": p, "lr": 1}`."""
    if not isinstance(group, ast.Call) or name_of(group.func) != "dict" or any(k.arg is None for k in group.keywords):
        return group
    keys: list[ast.expr | None] = [ast.copy_location(ast.Constant(value=k.arg), k) for k in group.keywords]
    return ast.copy_location(ast.Dict(keys=keys, values=[k.value for k in group.keywords]), group)


def _judge(context: Context, optimizer: ast.Call, group: ast.Dict) -> Iterator[Hit]:
    script = context.script
    entries = {k.value: v for k, v in zip(group.keys, group.values, strict=True) if isinstance(k, ast.Constant)}
    params, own = entries.get("params"), entries.get("weight_decay")
    if params is None or "lr" in entries:
        return  # why: with a rate of its own a group may have been sorted out for that
    spared, norms = _is_spared(script, params), _is_norms(script, params)
    if not spared and (not norms or own is None):
        return
    given = own if own is not None else argument(optimizer, 99, "weight_decay")
    decay = number_at(given, script, group)
    if given is None:
        decay = _DECAYED_BY_DEFAULT.get(last(script.full(optimizer.func)), 0.0)
    if decay is None or decay <= 0:
        return
    diff = context.edit().replace(own, "0.0").diff() if own is not None else ""
    what = ast.unparse(params) if isinstance(params, ast.Name | ast.Attribute) else "this group"
    message = f"{what} is split from the rest but has a weight decay of {decay:g}"
    yield hit("SS504", group, message, diff=diff, snippet='{"params": no_decay, "weight_decay": 0.0}')


def _is_spared(script: Script, params: ast.expr) -> bool:
    """By its name, or because a list of what is spared chose it: `any(nd in n for nd in no_decay)`."""
    if isinstance(params, ast.Name | ast.Attribute):
        return bool(SPARED.search(last(name_of(params))))
    return any(SPARED.search(word) for test in _tests(params) for word in _words(test))


def _is_norms(script: Script, params: ast.expr) -> bool:
    if not isinstance(params, ast.Name):
        return any(_asks_for_norms(test) for test in _tests(params))
    if NORM.search(params.id):
        return True
    name = _inside(script, params)
    chosen = [t for value in script.values(params.id, params) for t in _tests(value)]
    chosen += [t for call in script.calls.get("append", ()) for t in _branch(script, call, name)]
    return bool(chosen) and all(_asks_for_norms(test) for test in chosen)


def _inside(script: Script, params: ast.Name) -> str:
    """What a group is called in the function that sorted it out."""
    bound = script.bound(params.id, params)
    value, part = bound[0] if len(bound) == 1 else (params, None)
    maker = maker_of(script, value) if isinstance(value, ast.Call) else None
    returns = [n.value for n in ast.walk(maker) if isinstance(n, ast.Return)] if maker is not None else []
    given = returns[0] if len(returns) == 1 else None
    if isinstance(given, ast.Tuple) and part is not None and part < len(given.elts):
        return name_of(given.elts[part]) or params.id
    return params.id


def _branch(script: Script, call: ast.Call, name: str) -> Iterator[ast.expr]:
    """The test under which something is put into a list."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    if isinstance(owner, ast.IfExp) and name in (name_of(owner.body), name_of(owner.orelse)):
        yield owner.test if name == name_of(owner.body) else ast.UnaryOp(op=ast.Not(), operand=owner.test)
    elif isinstance(call.func, ast.Attribute) and name_of(call.func.value) == name:
        stmt = script.stmt_of(call)
        around = script.parents.get(stmt)
        if isinstance(around, ast.If):
            yield around.test if stmt in around.body else ast.UnaryOp(op=ast.Not(), operand=around.test)


def _tests(params: ast.expr) -> list[ast.expr]:
    """The conditions of a comprehension that choose, not those that leave out."""
    if not isinstance(params, ast.ListComp | ast.GeneratorExp):
        return []
    return [t for g in params.generators for t in g.ifs if not _refuses(t)]


def _refuses(test: ast.expr) -> bool:
    return any(isinstance(n, ast.Not | ast.NotIn) for n in ast.walk(test)) or any(
        last(name_of(c.func)) == "all" for c in calls_in(test)
    )


def _words(test: ast.expr) -> list[str]:
    return [last(name_of(n)) for n in ast.walk(test) if isinstance(n, ast.Name | ast.Attribute)]


def _asks_for_norms(test: ast.expr) -> bool:
    """`"norm" in name or "bias" in name`, `p.ndim < 2`; not where it may also choose others."""
    if _refuses(test):
        return False
    texts = [n.value for n in ast.walk(test) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    if texts:
        return any(_NORM_IN_TEXT.search(t) for t in texts)
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return False
    counts = any(word in ("ndim", "dim") for word in _words(test.left))
    limit = getattr(test.comparators[0], "value", None)
    below = isinstance(test.ops[0], ast.Lt) and limit == 2
    return counts and (below or (isinstance(test.ops[0], ast.LtE | ast.Eq) and limit == 1))
