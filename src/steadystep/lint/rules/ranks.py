"""SS702: one rank leaves out a backward pass that the others wait for."""

import ast
import re
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.events import Event
from steadystep.lint.names import name_of
from steadystep.lint.report import Hit
from steadystep.lint.rules.nan_drops import asks
from steadystep.lint.script import Script

_WRAPS = frozenset(
    ["DistributedDataParallel", "DDP", "FullyShardedDataParallel", "FSDP", "fully_shard", "init_process_group"]
)
_AGREES = re.compile(r"reduce|gather|broadcast|agree|any_rank|synchroni[sz]e|world", re.I)
_DEEPEST = 4


def check(context: Context) -> Iterator[Hit]:
    """For every backward in a loop of a program that runs on several ranks."""
    script = context.script
    if not script.calls.keys() & _WRAPS:
        return
    seen: set[ast.If] = set()
    for event in context.events("backward"):
        for loop in script.loops_of(event.node)[:1]:
            for test in (n for n in ast.walk(loop) if isinstance(n, ast.If)):
                if test not in seen and _leaves_out(script, test, event):
                    seen.add(test)
                    word = type(test.body[-1]).__name__.lower()
                    message = f"`{word}` on this rank only: the other ranks wait for its gradients in backward()"
                    yield hit("SS702", test, message, snippet=_TOGETHER)


def _leaves_out(script: Script, test: ast.If, event: Event) -> bool:
    """A loss that is not finite, as this rank sees it, ends the pass before backward."""
    if test.lineno >= event.line or script.scope_of(test) is not script.scope_of(event.node) or test.orelse:
        return False
    if not isinstance(test.body[-1], ast.Continue | ast.Break | ast.Return):
        return False
    names = {name_of(n) for n in ast.walk(test.test) if isinstance(n, ast.Name | ast.Attribute)} - {""}
    about = [name for name in names if asks(test.test, name, good=False)]
    if not about or _AGREES.search("\n".join(ast.unparse(s) for s in (test.test, *test.body))):
        return False
    return not any(_is_agreed(script, name, test) for name in about)


def _is_agreed(script: Script, name: str, at: ast.AST, depth: int = 0) -> bool:
    """What is asked about was put together from all ranks: where it was assigned, or by a call that changes it."""
    place = script.stmt_of(at).lineno
    scope = script.scope_of(at)
    for calls in script.calls.values():
        for call in calls:
            here = call.lineno < place and script.scope_of(call) is scope
            if here and _AGREES.search(name_of(call.func)) and name in {name_of(a) for a in call.args}:
                return True
    found = script.reaching(name, at)
    if found is None or depth > _DEEPEST:
        return False
    if _AGREES.search(ast.unparse(found[1])):
        return True
    inner = {name_of(n) for n in ast.walk(found[1]) if isinstance(n, ast.Name)} - {"", name}
    return any(_is_agreed(script, word, found[0], depth + 1) for word in inner)


_TOGETHER = """bad = (~torch.isfinite(loss.detach())).float()
torch.distributed.all_reduce(bad, op=torch.distributed.ReduceOp.MAX)
if bad.item():   # the same on every rank
    continue"""
