"""SS504 by a list of types or a table: norms among what is decayed, `decay["norm"] = 0.1`."""

import ast
import re
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.hit import Hit
from steadystep.lint.names import last, name_of, path_of
from steadystep.lint.numbers import number
from steadystep.lint.script import Script
from steadystep.lint.sources import sources

SPARED = re.compile(r"no_?(weight_?)?decay|without_?decay|undecayed|nodecay|no_wd", re.I)
NORM = re.compile(r"(^|_)(layer|batch|group|rms)?_?norms?(_|$|\d)|(^|_)(ln|bn)s?(_|$|\d)|(^|_)bias(es)?(_|$)", re.I)
_DECAYED = re.compile(r"decay|(^|_)wd(_|$)|regulari[sz]ed", re.I)
_NORM_LAYERS = re.compile(r"^(Layer|Batch|Group|Instance|RMS|Sync)\w*Norm(1d|2d|3d)?$")
_WEIGHT_LAYERS = ("Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose2d")
_PUTS = ("add", "append", "extend", "update")


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
            if any((number(v, context.script, v) or 0) > 0 for v in given):
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
        if NORM.search(word) and (number(value, script, value) or 0) > 0 and len(pairs) > 1:
            diff = context.edit().replace(value, "0.0").diff()
            yield hit("SS504", value, f"{word} has a weight decay of its own", diff=diff, snippet=f'"{word}": 0.0')


_WITHOUT = "(nn.Linear, nn.Conv2d)   # norms belong to the group without decay"
