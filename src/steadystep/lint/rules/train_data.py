"""SS404: a score that is called validation or test and is measured on the training data."""

import ast
import re
from collections.abc import Iterator

from steadystep.lint.context import Context, hit
from steadystep.lint.events import EnteredLoop
from steadystep.lint.names import last, name_of, parameters
from steadystep.lint.report import Hit
from steadystep.lint.rules.evaluation import evaluates_quietly
from steadystep.lint.rules.passes import HELD_OUT, TRAIN, Pass, measured_passes, names_in, passes, training_loops
from steadystep.lint.script import Script
from steadystep.lint.targets import target_of

HELD_OUT_DATA = "val_loss = evaluate(model, val_loader)   # data that is not used for training"
"""What it should look like."""

_SPLITS = ("random_split", "Subset", "SubsetRandomSampler", "train_test_split", "KFold", "StratifiedKFold")
_SCORE = re.compile(r"^(val|valid|validation|test|dev|eval|heldout|holdout)(_|$)", re.I)
_ROWS = re.compile(r"mask|idx|index|indices|nodes|(^|_)n?ids?(_|$)", re.I)
_PHASE = re.compile(r"split|phase|mode|stage|subset|partition", re.I)
_VALIDATES = re.compile(r"^_?(run_)?(validat\w*|val_(epoch|loop|loss|acc\w*)|test_(epoch|loop|loss|acc\w*))$", re.I)
_LABEL = re.compile(r"(^|\W|_)(val|valid|validation|test|dev|held.?out)(\W|_|$)", re.I)
_MEASURES = re.compile(
    r"eval|valid|test|score|acc(uracy)?(_|$)|error|loss|metric|rmse|mae|mse|auc|f1|perplexity|ppl|bleu|rouge|recall"
    r"|precision|ndcg|mrr|wer|cer|(^|_)(map|iou|dice|psnr)(_|$)",
    re.I,
)


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
                    yield hit("SS404", made, f"{title} returns {source}", snippet=HELD_OUT_DATA)


def check(context: Context) -> Iterator[Hit]:
    """In files that train: by the loop, by the call that measures, by the loader it is measured on."""
    script = context.script
    yield from by_trainer(context)
    if not any(True for _ in context.events("step", "scaler-step")):
        return
    for one in passes(context):
        if _picks_held_out_rows(one.node):
            continue
        quiet = all(evaluates_quietly(script, call) for call in one.forwards)
        if quiet and any(TRAIN.search(n) for n in one.over) and not any(HELD_OUT.search(n) for n in one.over):
            yield from _in_a_loop(script, one)
    for calls in list(script.calls.values()):
        for call in calls:
            yield from _by_call(context, call)
    yield from by_loader(context)
    yield from _by_phase(context)


def _picks_held_out_rows(loop: ast.AST) -> bool:
    """`rows = batch["val_mask"]`: one source holds all parts, as a graph does, and a mask says what is measured."""
    return any(HELD_OUT.search(word) and _ROWS.search(word) for word in names_in(loop))


def _is_chosen_by_phase(script: Script, loop: ast.AST) -> bool:
    """`for x in tables[f"{split}_x"]`, whatever the result is called: the phase decides what it is."""
    over = getattr(loop, "iter", None)
    if over is None:
        return False
    values = [v for n in ast.walk(over) if isinstance(n, ast.Name) for v in script.values(n.id, loop)]
    keys = [n.slice for v in (over, *values) for n in ast.walk(v) if isinstance(n, ast.Subscript)]
    return any(isinstance(n, ast.Name) and _PHASE.search(n.id) for key in keys for n in ast.walk(key))


def _in_a_loop(script: Script, one: Pass) -> Iterator[Hit]:
    scored = _scored(one.node)
    if any(_SCORE.match(name) for name in scored) or _said_to_be(script, one, scored) or _is_called_so(one):
        source = next(n for n in sorted(one.over) if TRAIN.search(n))
        message = f"a validation score is computed over {source}"
        yield hit("SS404", one.node, message, snippet="for x, y in val_loader: ...")


def _scored(loop: ast.AST) -> set[str]:
    """What is counted in a loop."""
    scored = {last(name_of(n.target)) for n in ast.walk(loop) if isinstance(n, ast.AugAssign)}
    return scored | {
        last(name_of(n.func.value))
        for n in ast.walk(loop)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in ("append", "update")
    }


def _is_called_so(one: Pass) -> bool:
    """The function is named after a validation, and nothing in it is named after held-out data."""
    if one.scope is None or not _VALIDATES.match(one.scope.name):
        return False
    words = {last(name_of(n)) for n in ast.walk(one.scope)} | {a.arg for a in one.scope.args.args}
    words -= {"eval"}
    return not any(HELD_OUT.search(word) for word in words) and not {"fit", "index", "append"} & words


def _said_to_be(script: Script, one: Pass, scored: set[str]) -> bool:
    """What was counted in the loop is printed next as a validation score, and held-out data is not looked at there."""
    block = next((b for b in _blocks(script, one.stmt) if one.stmt in b), [])
    for stmt in block[block.index(one.stmt) + 1 :][:6] if one.stmt in block else []:
        for node in ast.walk(stmt):
            if isinstance(node, ast.For | ast.While):
                return False
            if isinstance(node, ast.FormattedValue) and scored & {last(name_of(n)) for n in ast.walk(node.value)}:
                return any(_LABEL.search(words) and not TRAIN.search(words) for words in _words_before(script, node))
    return False


def _blocks(script: Script, stmt: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The block of a statement, or of the `with` around it."""
    parent = script.parents.get(stmt)
    if isinstance(parent, ast.With) and isinstance(outer := script.parents.get(parent), ast.AST):
        body = getattr(outer, "body", [])
        yield [stmt if s is parent else s for s in body]
    yield getattr(parent, "body", [])


def _by_call(context: Context, call: ast.Call) -> Iterator[Hit]:
    """`val_rmse = rmse(model, train_loader)`, and the same in a table, a log line or a keyword."""
    values = [*call.args, *(k.value for k in call.keywords)]
    trained = [data_name(a) for a in values if TRAIN.search(data_name(a)) and not _is_counter(context.script, a)]
    # why the whole name too: `dev_set.examples` is held out
    if not trained or any(HELD_OUT.search(n) for a in values for n in (data_name(a), *name_of(a).split("."))):
        return
    names = _names_of_result(context.script, call)
    if not names or not all(_SCORE.match(last(n)) or _LABEL.search(n) for n in names):
        return
    called = last(name_of(call.func))
    known = re.search(r"eval|valid|test|score|accuracy", called, re.I)
    short = any(last(n).lower() in ("val", "test", "dev", "eval", "valid") for n in names)
    if not known and (short or not (_MEASURES.search(called) or _only_measures(context, call))):
        return
    if "make" in called or "load" in called or "split" in called:
        return
    yield hit("SS404", context.script.stmt_of(call), f"{names[0]} is measured on {trained[0]}", snippet=HELD_OUT_DATA)


def _is_counter(script: Script, node: ast.expr) -> bool:
    """`train_iter`, which goes up by one: data does not."""
    counted = script.once(
        "counters",
        lambda: {name_of(n.target) for n in script.nodes if isinstance(n, ast.AugAssign) and name_of(n.target)},
    )
    return name_of(node) in counted


def _names_of_result(script: Script, call: ast.Call) -> list[str]:
    """What the result is called: by assignment, as a key, or in the words next to it."""
    parent = script.parents.get(call)
    while isinstance(parent, ast.Attribute | ast.Subscript | ast.BinOp | ast.Await) or (
        isinstance(parent, ast.Call) and name_of(parent.func) in ("float", "round")
    ):
        parent = script.parents.get(parent)
    if isinstance(parent, ast.Assign) and len(parent.targets) == 1:
        target = parent.targets[0]
        parts = target.elts if isinstance(target, ast.Tuple) else [target]
        return [name_of(t) or _key(t) for t in parts if name_of(t) != "_"]
    if isinstance(parent, ast.Dict):
        keys = [k for k, v in zip(parent.keys, parent.values, strict=True) if v is call or call in ast.walk(v)]
        return [str(k.value) for k in keys if isinstance(k, ast.Constant)]
    if isinstance(parent, ast.keyword) and parent.arg:
        return [parent.arg]
    if isinstance(parent, ast.FormattedValue):
        return _words_before(script, parent)
    if isinstance(parent, ast.Call) and last(name_of(parent.func)) in ("add_scalar", "log", "log_metric"):
        first = parent.args[0] if parent.args else None
        return [str(first.value)] if isinstance(first, ast.Constant) else []
    return []


def _words_before(script: Script, value: ast.FormattedValue) -> list[str]:
    """`val acc` of `f"train {a:.3f} val acc {b:.3f}"`: the text between the value before and this one."""
    text = script.parents.get(value)
    parts = text.values if isinstance(text, ast.JoinedStr) else []
    before = parts[parts.index(value) - 1] if value in parts and parts.index(value) > 0 else None
    return [str(before.value)] if isinstance(before, ast.Constant) else []


def _only_measures(context: Context, call: ast.Call) -> bool:
    """A function of this file that switches to eval mode or gradients off, and does not train."""
    function = target_of(call, context.script)
    if function is None:
        return False
    words = {n.attr for n in ast.walk(function) if isinstance(n, ast.Attribute)}
    return bool(words & {"eval", "no_grad", "inference_mode"}) and not words & {"backward", "step"}


def _data_of(script: Script, loop: EnteredLoop) -> tuple[str, object]:
    """Its path; of a parameter that no caller has named with the function: two have one name for their data."""
    scope = script.scope_of(loop.node)
    own = not loop.sites and scope is not None and loop.path.partition(".")[0] in parameters(scope)
    return loop.path, scope if own and not loop.path.startswith(("self.", "cls.")) else None


def _by_phase(context: Context) -> Iterator[Hit]:
    """A pass that measures in the phase of validation, over what is named after the training data, or is the same."""
    script = context.script
    for one in measured_passes(context):
        if _picks_held_out_rows(one.loop.node) or _is_chosen_by_phase(script, one.loop.node):
            continue
        phase = next((p for p in sorted(one.loop.phases) if HELD_OUT.search(p)), "")
        over = one.loop.over - one.loop.phases
        if phase and any(TRAIN.search(w) for w in over) and not any(HELD_OUT.search(w) for w in over):
            place = one.loop.sites[-1] if one.loop.sites else one.loop.node
            yield hit(
                "SS404", place, f"the phase is {phase}, but it iterates over the training data", snippet=HELD_OUT_DATA
            )
            continue
        same = {_data_of(script, loop) for root in context.roots for loop in training_loops(root)}
        if not one.loop.path or _data_of(script, one.loop) not in same or not (one.quiet or one.twin):
            continue
        if not one.loop.sites and any(_SCORE.match(name) for name in _scored(one.loop.node)):
            message = f"a validation score is computed over {one.loop.path}, which is trained on"
            yield hit("SS404", one.loop.node, message, snippet=HELD_OUT_DATA)
        for site in one.loop.sites[-1:]:
            names = _names_of_result(script, site)
            if names and all(_SCORE.match(last(n)) or _LABEL.search(n) for n in names):
                message = f"{names[0]} is measured on {one.loop.path}, which is trained on"
                yield hit("SS404", script.stmt_of(site), message, snippet=HELD_OUT_DATA)
