"""SS504: parameters that were sorted out to have no weight decay, and have it all the same."""

import ast
import re
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.hit import Hit
from steadystep.lint.names import argument, calls_in, last, name_of
from steadystep.lint.numbers import number
from steadystep.lint.rules.decayed_norms import NORM, SPARED, by_table, by_type
from steadystep.lint.script import Script
from steadystep.lint.sources import maker_of

_NORM_IN_TEXT = re.compile(r"norm|(^|[._])(ln|bn)(_|[.\d]|$)|bias", re.I)
_DECAYED_BY_DEFAULT = {"AdamW": 0.01, "Lion": 0.0}


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
    decay = number(given, script, group)
    if given is None:
        decay = _DECAYED_BY_DEFAULT.get(last(script.full(optimizer.func)), 0.0)
    if decay is None or decay <= 0:
        return
    diff = context.edit().replace(own, "0.0").diff() if own is not None else ""
    what = ast.unparse(params) if isinstance(params, ast.Name | ast.Attribute) else "this group"
    message = f"{what} was sorted out from the rest, but has a weight decay of {decay:g}"
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
