"""SS704: a checkpoint to resume from, without the optimizer's state."""

import ast
import re
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.names import last, name_of
from steadystep.lint.report import Hit
from steadystep.lint.script import Script
from steadystep.lint.sources import sources

_POSITION = re.compile(r"^(epoch|step|iter|iteration|global_step|next_epoch|start_epoch|it)s?$", re.I)
_SETTINGS = re.compile(r"^_?(config|cfg|conf|args|opts?|hparams|hyp|params|settings|options)$", re.I)
_RESTORES = re.compile(r"(restart|resume|restore|load)\w*(checkpoint|ckpt|state|run)|^(restart|resume|restore)", re.I)
_OPTIMIZER = re.compile(r"optim|(^|_)opt(_|$)|trainer|engine", re.I)


def check(context: Context) -> Iterator[Hit]:
    """Where a table with weights and a position is saved, and a position is read from a loaded one to go on."""
    script = context.script
    if not context.cycles or not _resumes(script) or _keeps_optimizer(script):
        return
    if all(_is_plain_sgd(context, made) for made in _optimizers(context)):
        return
    saves = [c for c in script.calls.get("save", ()) if script.full(c.func) == "torch.save"]
    for table in (t for call in sorted(saves, key=lambda c: c.lineno) for t in _tables(script, call)):
        keys = [k.value for k in table.keys if isinstance(k, ast.Constant) and isinstance(k.value, str)]
        weights = any("state_dict" in ast.unparse(v) for v in table.values)
        if weights and any(_POSITION.search(k) for k in keys) and None not in table.keys:
            message = "the checkpoint holds the position but not the optimizer: a resumed run starts with empty moments"
            yield hit("SS704", table, message, snippet='"optimizer": optimizer.state_dict(),   # load it on resume too')
            return


def _tables(script: Script, call: ast.Call) -> list[ast.Dict]:
    """What is saved, here or by those who call the function that saves it."""
    given = call.args[0] if call.args else None
    if isinstance(given, ast.Name):
        later = [n for n in script.nodes if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store)]
        # why: an entry by its name is read like the others, in `_keeps_optimizer`
        if any(name_of(n.value) == given.id and not isinstance(n.slice, ast.Constant) for n in later):
            return []
    made = [v for v, _ in sources(script, given)] if given is not None else []
    made = [v for v in made if not (isinstance(v, ast.Call) and last(name_of(v.func)) == "load")]  # read on resume
    return [v for v in made if isinstance(v, ast.Dict)] if all(isinstance(v, ast.Dict) for v in made) else []


def _resumes(script: Script) -> bool:
    """`start = torch.load(path)["epoch"]`, at once or through a name, and weights that are loaded."""
    if any(_is_restored(script, call) for calls in list(script.calls.values()) for call in calls):
        return True
    if "load_state_dict" not in script.calls or "load" not in script.calls:
        return False
    for node in script.nodes:
        if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Load):
            continue
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if not isinstance(key, str) or not _POSITION.search(key) or not isinstance(node.value, ast.Name | ast.Call):
            continue
        made = script.values(name_of(node.value), node) if isinstance(node.value, ast.Name) else [node.value]
        stmt = script.stmt_of(node)
        if isinstance(stmt, ast.Assign) and any(
            isinstance(v, ast.Call) and last(name_of(v.func)) in ("load", "load_checkpoint") for v in made
        ):
            return True
    return False


def _is_restored(script: Script, call: ast.Call) -> bool:
    """`restart_from_checkpoint(path, run_variables=state, ...)`, and then `start = state["epoch"]`."""
    if not _RESTORES.search(name_of(call.func)):
        return False
    for name in (a.id for a in (*call.args, *(k.value for k in call.keywords)) if isinstance(a, ast.Name)):
        tables = [v for v in script.values(name, call) if isinstance(v, ast.Dict)]
        keys = {k.value for t in tables for k in t.keys if isinstance(k, ast.Constant) and isinstance(k.value, str)}
        for key in (k for k in keys if _POSITION.search(k)):
            read = [n for n in script.nodes if isinstance(n, ast.Subscript) and name_of(n.value) == name]
            if any(getattr(n.slice, "value", None) == key and n.lineno > call.lineno for n in read):
                return True
    return False


def _keeps_optimizer(script: Script) -> bool:
    """The state of an optimizer, or of what may hold one, is asked for somewhere, or its key is written."""
    for name in ("state_dict", "load_state_dict", "optim_state_dict", "get_state_dict", "save_state"):
        for call in script.calls.get(name, ()):
            owner = call.func.value if isinstance(call.func, ast.Attribute) else call.func
            if name not in ("state_dict", "load_state_dict") or _OPTIMIZER.search(ast.unparse(owner)):
                return True
    texts = [(n, n.value) for n in script.nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    named = [n for n, text in texts if _OPTIMIZER.search(text) and len(text) < 40 and " " not in text]
    return any(not _is_setting(script, n) for n in named)


def _is_setting(script: Script, text: ast.AST) -> bool:
    """`config["training"]["optimizer"]`: what the optimizer is, not its state."""
    entry = script.parents.get(text)
    while isinstance(entry, ast.Subscript):
        entry = entry.value
    return bool(_SETTINGS.match(last(name_of(entry))))


def _optimizers(context: Context) -> list[ast.Call]:
    return [c for calls in context.script.calls.values() for c in calls if context.roles.is_optimizer(c)]


def _is_plain_sgd(context: Context, made: ast.Call) -> bool:
    """SGD without momentum has no state."""
    momentum = any(k.arg in ("momentum", None) for k in made.keywords) or len(made.args) > 2
    return last(context.script.full(made.func)) == "SGD" and not momentum
