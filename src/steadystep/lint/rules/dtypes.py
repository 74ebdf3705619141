"""Which type mixed precision has in a script, and whether it is on: through names, tables, options and `getattr`."""

import ast

from steadystep.lint.bindings import parameters
from steadystep.lint.constructors import fulls_of, setting
from steadystep.lint.names import argument, last
from steadystep.lint.script import Script
from steadystep.lint.sources import sources

FP16 = ("torch.float16", "torch.half")
BF16 = ("torch.bfloat16",)
_HALF_WORDS = frozenset(["fp16", "float16", "half", "16", "16-mixed", "f16"])


def casts_of(script: Script) -> list[ast.Call]:
    """Every autocast, and every `partial` of one."""
    found = [c for c in script.calls.get("autocast", ()) if _is_autocast(script, c)]
    return found + [c for c in script.calls.get("partial", ()) if c.args and "autocast" in script.full(c.args[0])]


def _is_autocast(script: Script, call: ast.Call) -> bool:
    return "autocast" in script.full(call.func) and not script.full(call.func).startswith("self.")


def dtype_of(script: Script, call: ast.Call) -> str:
    """`fp16`, `bf16`, or empty when the file does not say."""
    full = script.full(call.func)
    given = next(iter(setting(call, script, "dtype")), None)
    old = ".cuda.amp." in full
    if last(full) == "partial" and given is None:
        return ""
    if given is None and len(call.args) > 1 and not old and not isinstance(call.args[1], ast.Constant):
        given = call.args[1]
    if given is not None:
        names = fulls_of(given, script)
        if _may_be_brain(script, given):
            return ""
        if names and names <= set(FP16):
            return "fp16"
        return "bf16" if names and names <= set(BF16) and not _may_be_half(script, given) else ""
    if old:
        return "fp16"
    device = argument(call, 0, "device_type")
    return "fp16" if isinstance(device, ast.Constant) and str(device.value).startswith("cuda") else ""


def _may_be_brain(script: Script, given: ast.expr) -> bool:
    """A parameter, or a name of a loop, in a file that has bf16 elsewhere than in a table: callers may give either."""
    scope = script.scope_of(given)
    if not isinstance(given, ast.Name) or scope is None or (scope, given.id) in script.assigned:
        return False
    for node in script.nodes:
        if isinstance(node, ast.Attribute) and script.full(node) in BF16:
            around = script.parents.get(node)
            if not isinstance(around, ast.Dict | ast.Compare) and given.id in parameters(scope):
                return True
    return False


def _may_be_half(script: Script, given: ast.expr) -> bool:
    """An option with which the user can also ask for fp16, or a table that has it too."""
    seen = [n for value, _ in sources(script, given) for n in ast.walk(value)] + list(ast.walk(given))
    texts = [v for n in seen if isinstance(n, ast.expr) for v, _ in sources(script, n) if isinstance(v, ast.Constant)]
    for text in texts:
        around = script.parents.get(script.parents.get(text, text))
        options = [k.value for k in around.keywords if k.arg == "choices"] if isinstance(around, ast.Call) else []
        words = {str(getattr(n, "value", "")) for o in options for v, _ in sources(script, o) for n in ast.walk(v)}
        if words & _HALF_WORDS:
            return True
    tables = [v for n in ast.walk(given) if isinstance(n, ast.Subscript) for v, _ in sources(script, n.value)]
    return any(script.full(e) in FP16 for t in tables if isinstance(t, ast.Dict) for e in t.values)


def always_on(script: Script, call: ast.Call) -> bool:
    """Nothing switches it off, or what does is set to True in the file."""
    enabled = setting(call, script, "enabled")
    found = [v for e in enabled for v, _ in sources(script, e)]
    return all(isinstance(v, ast.Constant) and v.value is True for v in found)


def may_be_on(script: Script, call: ast.Call) -> bool:
    """On, or switched by something that the file does not set to False."""
    enabled = setting(call, script, "enabled")
    if not enabled or isinstance(enabled[0], ast.Constant):
        return always_on(script, call)
    values = [v for v, _ in sources(script, enabled[0])]
    return not isinstance(enabled[0], ast.Compare) and not any(getattr(v, "value", None) is False for v in values)
