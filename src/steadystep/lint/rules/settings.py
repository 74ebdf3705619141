"""Numbers: SS502 an odd learning rate, SS503 an absurd clip."""

import ast
from collections.abc import Iterator

from steadystep.lint.constructors import made, setting
from steadystep.lint.context import Context, hit
from steadystep.lint.names import argument, last, looks_like_loss, name_of
from steadystep.lint.numbers import number_at, written_at
from steadystep.lint.report import Hit
from steadystep.lint.roles import ADAM_LIKE
from steadystep.lint.rules.decay import groups_of
from steadystep.lint.script import Script

# Adam: linear models on fixed features and prompts are trained with 0.2 and 0.3 (Wu et al. 2019, Lester et al. 2021)
_USUAL = {"adam": (1e-8, 0.3), "SGD": (1e-6, 30.0), "RMSprop": (1e-9, 0.1), "Lion": (1e-9, 0.03)}
_FINE_TUNED = 0.02  # with Adam: a pretrained network is wiped out far below
_SUMMED = 1e-2  # of the least: a loss that is a sum over the batch is larger by its size, gradients too
_REPLACE = ("OneCycleLR", "CyclicLR", "MultiplicativeLR", "LRFinder", "lr_find", "find_lr")
_RAISE = (*_REPLACE, "LambdaLR", "ExponentialLR")
_TABLES = ("Embedding", "ParameterList", "ParameterDict", "EmbeddingBag")  # prompts and latents have rates of their own
_CLIP = (1e-4, 1e3)
_MEASURES_ONLY = 1e8  # limits like 1e9 or inf are the idiom for reading the norm
_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "clip_gradients")
_LIMITS = ("max_norm", "clip_value", "clip_val", "gradient_clip_val")
_TRAINERS = ("max_grad_norm", "gradient_clip_val")


def check(context: Context) -> Iterator[Hit]:
    """Both."""
    yield from _odd_rates(context)
    yield from _absurd_clips(context)


def _odd_rates(context: Context) -> Iterator[Hit]:
    for calls in list(context.script.calls.values()):
        for call in calls:
            if not context.roles.is_optimizer(call) or not _trains_a_network(context, call):
                continue
            full, _ = made(call, context.script)
            kind = last(full)
            usual = _USUAL.get("adam" if kind in ADAM_LIKE else kind)
            if usual is None:
                continue
            if kind in ADAM_LIKE and _is_pretrained(context, call):
                usual = (usual[0], _FINE_TUNED)
            for given in _rates(context.script, call):
                yield from _odd(context, call, given, usual)


def _rates(script: Script, optimizer: ast.Call) -> Iterator[ast.expr]:
    """The rate of an optimizer, by its place, its name or a table of options, and those of its groups."""
    _, whole = made(optimizer, script)
    given = argument(whole, 1, "lr")
    if given is not None:
        yield given
    else:
        yield from setting(whole, script, "lr")
    groups = argument(whole, 0, "params")
    listed = groups.elts if isinstance(groups, ast.List) else groups_of(script, optimizer)
    for group in listed:
        pairs = zip(group.keys, group.values, strict=True) if isinstance(group, ast.Dict) else ()
        yield from (v for k, v in pairs if isinstance(k, ast.Constant) and k.value == "lr")
        if isinstance(group, ast.Call) and name_of(group.func) == "dict":
            yield from (k.value for k in group.keywords if k.arg == "lr")


def _odd(context: Context, call: ast.Call, given: ast.expr, usual: tuple[float, float]) -> Iterator[Hit]:
    kind, rate = last(made(call, context.script)[0]), number_at(given, context.script, given)
    if rate is None or rate == 0:
        return
    least = usual[0] * (_SUMMED if kind == "SGD" and not _averaged(context) else 1.0)
    if least <= rate <= usual[1] or (rate < least and _is_raised(context)):
        return
    if rate > usual[1] and _is_a_factor(context, rate, usual[1]):
        return
    message = f"a learning rate of {rate:g} for {kind}: {usual[0]:g} to {usual[1]:g} is usual"
    where = written_at(given, context.script, given)
    yield hit("SS502", where, message, snippet=f"lr={'1e-3' if kind in ADAM_LIKE else '0.1'}")


def _trains_a_network(context: Context, optimizer: ast.Call) -> bool:
    """Not a picture, a latent or a few numbers, for which other rates are right."""
    names = context.roles.networks_of(optimizer)
    if names:
        made_from = [v for n in names for v in context.script.values(n, optimizer)]
        tables = [isinstance(v, ast.Call) and last(name_of(v.func)) in _TABLES for v in made_from]
        return not tables or not all(tables)
    params = argument(optimizer, 0, "params")
    if groups_of(context.script, optimizer) and "named_parameters" in context.script.calls:
        return True
    return any(
        isinstance(n, ast.Attribute) and n.attr in ("parameters", "named_parameters")
        for n in ast.walk(params or optimizer)
    )


def _is_pretrained(context: Context, optimizer: ast.Call) -> bool:
    """A whole language model that was trained before; adapters and heads are another matter."""
    if context.mentions("get_peft_model", "add_adapter", "requires_grad_", "LoraConfig"):
        return False
    if "requires_grad" in context.script.attributes:
        return False
    values = context.script.values(context.roles.model_of(optimizer), optimizer)
    plain = [
        v.func.value
        if isinstance(v, ast.Call) and isinstance(v.func, ast.Attribute) and v.func.attr in ("to", "cuda")
        else v
        for v in values
    ]
    return bool(plain) and all(isinstance(v, ast.Call) and last(name_of(v.func)) == "from_pretrained" for v in plain)


def _is_raised(context: Context) -> bool:
    """A first value that is not the one it trains with: warm-up from below, a range test."""
    own = [c.name for c in context.script.classes.values() if any("LRScheduler" in name_of(b) for b in c.bases)]
    return _is_written(context.script) or context.mentions(*_RAISE, *own)


def _is_a_factor(context: Context, rate: float, most: float) -> bool:
    """The rate is only a factor of what a schedule gives, or is replaced before the first update.

    With 1.0 the function of a `LambdaLR` gives the rate itself (Vaswani et al. 2017); with another value it is a factor
    of at most one where it is capped there, and unknown else.
    """
    if _is_written(context.script):
        return True
    for call in (c for name in _REPLACE for c in context.script.calls.get(name, ())):
        highest = number_at(argument(call, 99, "max_lr") or argument(call, 1, "max_lr"), context.script, call)
        if highest is None or highest <= most:
            return True
    given = [argument(c, 1, "lr_lambda") for c in context.script.calls.get("LambdaLR", ())]
    return bool(given) and (rate == 1.0 or not all(_is_capped(context.script, g) for g in given))


def _is_capped(script: Script, given: ast.expr | None) -> bool:
    bodies: list[ast.AST] = [given] if isinstance(given, ast.Lambda) else list(script.functions.get(name_of(given), ()))
    calls = [n for b in bodies for n in ast.walk(b) if isinstance(n, ast.Call)]
    return any(name_of(c.func) == "min" and any(getattr(a, "value", None) in (1, 1.0) for a in c.args) for c in calls)


def _is_written(script: Script) -> bool:
    return script.once("a rate is written", lambda: any(_writes_a_rate(n) for n in script.nodes))


def _writes_a_rate(node: ast.AST) -> bool:
    stored = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    return stored and getattr(getattr(node, "slice", None), "value", None) == "lr"


def _averaged(context: Context) -> bool:
    """The losses are torch's and none of them is a sum: with SGD the size of the gradient decides what a rate means."""
    return context.script.once("averaged", lambda: _are_averaged(context.script))


def _are_averaged(script: Script) -> bool:
    known = False
    for name, calls in script.calls.items():
        for call in calls:
            if any(k.arg in ("reduction", "size_average") for k in call.keywords):
                return False
            if name == "sum" and _is_for_a_loss(script, call):
                return False
            full = script.full(call.func)
            known = known or (full.startswith("torch.nn.") and full.endswith(("Loss", "_loss", "cross_entropy")))
    return known


def _is_for_a_loss(script: Script, call: ast.Call) -> bool:
    stmt = script.stmt_of(call)
    around = [a for a in script.ancestors(call) if isinstance(a, ast.Attribute)]
    if any(a.attr == "item" for a in around):
        return False
    targets = stmt.targets if isinstance(stmt, ast.Assign) else [stmt.target] if isinstance(stmt, ast.AugAssign) else []
    if any(looks_like_loss(name_of(t)) for t in targets) or "backward" in ast.unparse(stmt):
        return True
    scope = script.scope_of(call)
    return scope is not None and (looks_like_loss(scope.name) or scope.name == "forward")


def _absurd_clips(context: Context) -> Iterator[Hit]:
    for call, given in _limits(context):
        limit = number_at(given, context.script, call)
        if limit is None or limit <= 0 or _CLIP[0] <= limit <= _CLIP[1] or limit >= _MEASURES_ONLY:
            continue
        where = written_at(given, context.script, call)
        number_there = where if isinstance(where, ast.Constant) else given
        diff = context.edit().replace(number_there, "1.0").diff() if isinstance(number_there, ast.Constant) else ""
        verb = "never clips" if limit > _CLIP[1] else "leaves next to nothing of any gradient"
        message = f"a limit of {limit:g} {verb}; 0.5 to 5 is usual"
        yield hit("SS503", where if where is not given else call, message, diff=diff, snippet="max_norm=1.0")


def _limits(context: Context) -> Iterator[tuple[ast.Call, ast.expr]]:
    for name in _CLIPS:
        for call in context.script.calls.get(name, ()):
            given = argument(call, 1 if name != "clip_gradients" else 99, *_LIMITS)
            spread = [given] if given is not None else setting(call, context.script, *_LIMITS)
            yield from ((call, value) for value in spread)
    for calls in list(context.script.calls.values()):
        for call in calls:
            if last(name_of(call.func)).endswith(("Trainer", "Arguments", "Config")):
                yield from ((call, k.value) for k in call.keywords if k.arg in _TRAINERS)
