"""SS505 in a mean: NaN losses that are left out when a list of them is averaged."""

import ast
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.hit import Hit
from steadystep.lint.names import name_of
from steadystep.lint.rules.finite import SAY_SO, asks
from steadystep.lint.rules.trained import cut_value, trained_losses


def left_out(context: Context) -> Iterator[Hit]:
    """`np.nanmean(losses)` of a list of training losses, or a list that is filtered before its mean is taken."""
    script = context.script
    listed = set()
    for scope, name in trained_losses(context):
        for call in script.calls.get("append", ()):
            if script.scope_of(call) is scope and call.args and name_of(cut_value(call.args[0])) == name:
                assert isinstance(call.func, ast.Attribute)
                listed.add((scope, name_of(call.func.value)))
    for leaf in ("nanmean", "nanmedian", "nansum"):
        for call in script.calls.get(leaf, ()):
            if call.args and (script.scope_of(call), name_of(call.args[0])) in listed:
                held = name_of(call.args[0])
                yield hit("SS505", call, f"{leaf} leaves the NaN losses in {held} out", snippet=SAY_SO)
    for node in script.nodes:
        if isinstance(node, ast.ListComp | ast.GeneratorExp) and len(node.generators) == 1:
            part = node.generators[0]
            held, each = name_of(part.iter), name_of(part.target)
            if (script.scope_of(node), held) in listed and part.ifs and all(asks(t, each, good=True) for t in part.ifs):
                yield hit("SS505", node, f"the NaN losses in {held} are left out", snippet=SAY_SO)
