"""What a call makes, when the class is chosen by name, from a table or through `partial`."""

import ast

from steadystep.lint.flow import UNKNOWN, answer
from steadystep.lint.names import last, name_of, path_of
from steadystep.lint.script import Script
from steadystep.lint.sources import sources


def made(call: ast.Call, script: Script) -> tuple[str, ast.Call]:
    """The full name of what is made, and the call with everything that `partial` had given before."""
    key = ("made", call)
    if key not in script.memo:
        script.memo[key] = (script.full(call.func), call)
        script.memo[key] = _made(call, script)
    found: tuple[str, ast.Call] = script.memo[key]
    return found


def written_text(node: ast.expr, script: Script) -> str:
    """The text that an expression stands for, when there is just one."""
    found = {value.value for value, _ in sources(script, node) if isinstance(value, ast.Constant)}
    texts = {text for text in found if isinstance(text, str)}
    return texts.pop() if len(texts) == 1 and len(found) == 1 else ""


def full_of(node: ast.expr, script: Script) -> str:
    """`torch.float16` of that, of a name for it, of `getattr(torch, "float16")` and of an entry of a table."""
    names = fulls_of(node, script)
    return next(iter(names)) if len(names) == 1 else ""


def fulls_of(node: ast.expr, script: Script) -> set[str]:
    """All that an expression may be, by their full names; an empty one for what the file does not tell."""
    key = ("fulls", node)
    if key not in script.memo:
        script.memo[key] = {""}  # why: `self.f = partial(self.f, x)` leads back to itself and says nothing
        script.memo[key] = _fulls(node, script)
    found: set[str] = script.memo[key]
    return found


def _fulls(node: ast.expr, script: Script) -> set[str]:
    plain = script.full(node)
    if plain.partition(".")[0] in ("torch", "apex", "transformers", "lion_pytorch", "bitsandbytes", "timm"):
        return {plain}
    found = set()
    for value, part in sources(script, _entry(node, script)):
        full = script.full(value)
        if isinstance(value, ast.Call) and name_of(value.func) == "getattr" and len(value.args) > 1:
            word = written_text(value.args[1], script)
            full = f"{script.full(value.args[0])}.{word}" if word else ""
        elif isinstance(value, ast.Call) and last(name_of(value.func)) == "partial" and value.args:
            full = full_of(value.args[0], script)
        found.add(full if part is None else "")
    return found


def _entry(node: ast.expr, script: Script) -> ast.expr:
    """`TABLE["bf16"]` for `TABLE[args.dtype]`, where the option has one default."""
    if not isinstance(node, ast.Subscript) or isinstance(node.slice, ast.Constant):
        return node
    word = written_text(node.slice, script) or answer(node.slice, {}, script)
    if word is UNKNOWN or not isinstance(word, str):
        return node
    listed = script.values(f"{path_of(node.value)}[{word!r}]", node) if path_of(node.value) else []
    return listed[0] if len(listed) == 1 else node


def _made(call: ast.Call, script: Script) -> tuple[str, ast.Call]:
    full = script.full(call.func)
    if "." in full and full.partition(".")[0] in script.imports.values():
        return full, call
    if isinstance(call.func, ast.Name) and (full in script.classes or full in script.functions):
        return full, call
    spread, chosen = call, fulls_of(call.func, script)
    for value, _ in sources(script, call.func):
        if isinstance(value, ast.Call) and last(name_of(value.func)) == "partial" and value.args:
            spread = ast.copy_location(
                ast.Call(
                    func=value.args[0], args=[*value.args[1:], *call.args], keywords=[*call.keywords, *value.keywords]
                ),
                call,
            )
    name = next(iter(chosen)) if len(chosen) == 1 else _alike(chosen)
    return name or full, spread


def _alike(names: set[str]) -> str:
    """`torch.optim` for one of several optimizers."""
    return "torch.optim." if names and all(n.startswith("torch.optim.") for n in names) else ""


def setting(call: ast.Call, script: Script, *names: str) -> list[ast.expr]:
    """What a call is given by any of these names, also in a table that is spread out."""
    plain = [k.value for k in call.keywords if k.arg in names]
    tables = [path_of(k.value) for k in call.keywords if k.arg is None and path_of(k.value)]
    spread = [v for table in tables for name in names for v in script.values(f"{table}[{name!r}]", call)]
    written = [k.value for k in call.keywords if isinstance(k.value, ast.Dict) and k.arg is None]
    for table in written:
        pairs = zip(table.keys, table.values, strict=True)
        spread += [v for k, v in pairs if isinstance(k, ast.Constant) and k.value in names]
    return plain or list({id(v): v for v in spread}.values())
