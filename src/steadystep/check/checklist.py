"""The checklist for a script: each item with the line it was concluded from. Absence is no fault, so none is a hit."""

import ast
from collections.abc import Iterator

from steadystep.check.context import Context
from steadystep.check.hit import Item, State
from steadystep.check.marks import Marks
from steadystep.check.names import argument, name_of
from steadystep.check.rules.decay import groups_of
from steadystep.check.rules.warmups import BETA2, settle_steps


def checklist(context: Context) -> Iterator[Item]:
    """All items, in the order of a training step; nothing for a script that does not train."""
    marks = Marks(context)
    if not (context.trains or marks.hugging_face or marks.lightning):
        return
    for find in (
        _clipping,
        _warmup,
        _schedule,
        _precision,
        _nan_check,
        _norms,
        _checkpoints,
        _validation,
        _seed,
        _decay,
    ):
        yield find(context, marks)
    if marks.hugging_face:
        yield _nan_filter(marks)


def _item(name: str, line: int | None, evidence: str, *, state: State = "present", fix: str = "") -> Item:
    return Item(name=name, state=state, evidence=evidence, line=line, fix=fix)


def _clipping(context: Context, marks: Marks) -> Item:
    name = "gradient clipping"
    clip = next(context.events("clip"), None)
    if clip is not None:
        return _item(name, clip.line, "clipped")
    setting = marks.keyword("gradient_clip_val", "max_grad_norm", "grad_clip", "clip_grad")
    if setting is not None:
        return _item(name, setting[0], f"set to {ast.unparse(setting[1])}")
    if own := marks.word("clip_grad"):
        return _item(name, own, "a function of your own")
    if marks.hugging_face:
        return _item(name, marks.hugging_face, "the Trainer's default, max_grad_norm = 1.0")
    fix = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)   # after backward()"
    if marks.guard:
        fix = 'steadystep.Guard(model, optimizer, config={"training": {"max_grad_norm": 1.0}})'
        return _item(name, marks.guard, "no fixed limit; the guard holds outliers back", state="partial", fix=fix)
    return _item(name, None, "none found", state="absent", fix=fix)


def _warmup(context: Context, marks: Marks) -> Item:
    name = "warm-up"
    setting = marks.keyword("num_warmup_steps", "warmup_steps", "warmup_ratio", "warmup_t", "warmup_iters")
    if setting is not None:
        value = setting[1].value if isinstance(setting[1], ast.Constant) else None
        if value in (0, 0.0):
            return _item(name, setting[0], "switched off", state="absent", fix="warmup_steps: 5 to 10 % of all steps")
        if isinstance(value, int) and value < settle_steps(BETA2) / 4:
            evidence = f"{value} steps; Adam's second moment settles in about {settle_steps(BETA2):.0f} (beta2 0.999)"
            return _item(name, setting[0], evidence, state="partial", fix="a longer one, or beta2 = 0.95")
        return _item(name, setting[0], ast.unparse(setting[1]))
    for called, calls in context.script.calls.items():
        if "warmup" in called:
            return _item(name, calls[0].lineno, called)
    if line := marks.word("warmup"):
        return _item(name, line, "by hand")
    if line := marks.call("OneCycleLR", "LinearLR", "CyclicLR"):
        return _item(name, line, "the schedule begins low")
    fix = "torch.optim.lr_scheduler.LinearLR(optimizer, 1e-3, total_iters=2000), then the decay"
    return _item(name, None, "none found", state="absent", fix=fix)


def _schedule(context: Context, marks: Marks) -> Item:
    name = "learning-rate schedule"
    for calls in context.script.calls.values():
        for call in calls:
            if context.roles.made_by(call) == "scheduler":
                return _item(name, call.lineno, name_of(call.func).rpartition(".")[2])
    for node in context.script.nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            key = node.targets[0].slice
            if isinstance(key, ast.Constant) and key.value == "lr":
                return _item(name, node.lineno, "set by hand")
    if setting := marks.keyword("lr_scheduler", "lr_scheduler_type"):
        return _item(name, setting[0], ast.unparse(setting[1]))
    if event := next(context.events("schedule"), None):
        return _item(name, event.line, "stepped here")
    if marks.hugging_face:
        return _item(name, marks.hugging_face, "the Trainer's default, linear")
    fix = "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)"
    return _item(name, None, "a constant learning rate", state="absent", fix=fix)


def _precision(context: Context, marks: Marks) -> Item:
    name = "mixed precision"
    scaler, cast = marks.call("GradScaler"), marks.call("autocast")
    if cast and scaler:
        return _item(name, cast, f"autocast, scaler at line {scaler}")
    if cast:
        return _item(name, cast, "autocast")
    for setting in (marks.keyword("mixed_precision", "precision"), marks.keyword("bf16", "fp16")):
        if setting is not None:
            return _item(name, setting[0], ast.unparse(setting[1]))
    fix = 'with torch.autocast("cuda", dtype=torch.bfloat16): ...   # needs no scaler'
    return _item(name, None, "fp32 throughout", state="absent", fix=fix)


def _nan_check(context: Context, marks: Marks) -> Item:
    name = "NaN check"
    if marks.guard:
        return _item(name, marks.guard, "the guard looks at every update")
    if line := marks.call("isfinite", "isnan", "isinf", "detect_anomaly", "set_detect_anomaly"):
        return _item(name, line, "looked for")
    if setting := marks.keyword("error_if_nonfinite", "detect_anomaly"):
        return _item(name, setting[0], "asked for")
    fix = "steadystep.Guard(model, optimizer).step(lambda: loss_fn(model(x), y))"
    if event := next(context.events("scaler-step"), None):
        evidence = "the scaler skips infinite gradients; a NaN in the loss is not told apart"
        return _item(name, event.line, evidence, state="partial", fix=fix)
    return _item(name, None, "none found: one NaN reaches the weights", state="absent", fix=fix)


def _norms(context: Context, marks: Marks) -> Item:
    name = "gradient norm watched"
    if marks.guard:
        return _item(name, marks.guard, "measured and logged by the guard")
    for clip in context.events("clip"):
        if not isinstance(clip.stmt, ast.Expr):
            return _item(name, clip.line, "the norm that clipping returns is kept")
    clipped = {c.lineno for word in ("clip_grad_norm_", "clip_grad_norm") for c in context.script.calls.get(word, ())}
    if line := marks.word("grad_norm", but_not=clipped):
        return _item(name, line, "measured")
    if marks.hugging_face:
        return _item(name, marks.hugging_face, "the Trainer logs grad_norm")
    fix = "norm = torch.nn.utils.clip_grad_norm_(...)   # returns it: log it"
    return _item(name, None, "not logged", state="absent", fix=fix)


def _checkpoints(context: Context, marks: Marks) -> Item:
    name = "checkpoints"
    if line := marks.call("save_checkpoint", "save_state", "ModelCheckpoint", "dcp_save"):
        return _item(name, line, "saved")
    if marks.guard and marks.keyword("run_dir"):
        return _item(name, marks.guard, "by the guard with Guard.resume or save_checkpoints")
    saves = sorted(context.script.calls.get("save", ()), key=lambda c: c.lineno)
    for call in saves:
        given = argument(call, 0, "obj")
        text = ast.unparse(call).lower()
        values = context.script.values(name_of(given), call) if given is not None and name_of(given) else []
        if "optim" in text or "opt" in text or any("optim" in ast.unparse(v).lower() for v in values):
            return _item(name, call.lineno, "model and optimizer")
    if saves:
        fix = 'torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)'
        return _item(name, saves[0].lineno, "weights only: no exact resume", state="partial", fix=fix)
    if line := marks.call("save_pretrained"):
        return _item(name, line, "weights only: no exact resume", state="partial", fix="save the optimizer too")
    if line := marks.hugging_face or marks.lightning:
        return _item(name, line, "the trainer's default")
    return _item(name, None, "none found", state="absent", fix='torch.save({"model": ..., "optimizer": ...}, path)')


def _validation(context: Context, marks: Marks) -> Item:
    name = "validation"
    if event := next(context.events("eval"), None):
        return _item(name, event.line, "evaluated in eval mode")
    if line := marks.call("validate", "evaluate", "eval") or marks.word("validation_step"):
        return _item(name, line, "evaluated")
    if setting := marks.keyword("eval_dataset", "val_dataloaders", "eval_strategy"):
        return _item(name, setting[0], "given to the trainer")
    return _item(
        name, None, "none found: overfitting would not be seen", state="absent", fix="evaluate on held-out data"
    )


def _seed(context: Context, marks: Marks) -> Item:
    line = marks.call("manual_seed", "set_seed", "seed_everything", "manual_seed_all") or marks.word("seed")
    if line or marks.hugging_face:
        return _item("seed", line or marks.hugging_face, "set" if line else "the Trainer's default, 42")
    fix = "torch.manual_seed(0)   # before the model is made"
    return _item("seed", None, "none: two runs cannot be compared", state="absent", fix=fix)


def _decay(context: Context, marks: Marks) -> Item:
    name = "no decay on norms, biases"
    made = [c for calls in context.script.calls.values() for c in calls if context.roles.is_optimizer(c)]
    for call in made:
        kind = context.script.full(call.func).rpartition(".")[2]
        given = next((k.value for k in call.keywords if k.arg == "weight_decay"), None)
        off = isinstance(given, ast.Constant) and given.value in (0, 0.0)
        if not context.roles.model_of(call) or groups_of(context.script, call):
            return _item(name, call.lineno, "parameters are in groups")
        if (given is not None and not off) or (given is None and kind == "AdamW"):
            evidence = "all parameters are decayed; common, and rarely a cause of trouble"
            fix = "steadystep.groups, or two groups: p.ndim >= 2 with decay, the rest without"
            return _item(name, call.lineno, evidence, state="partial", fix=fix)
    if marks.hugging_face:
        return _item(name, marks.hugging_face, "the Trainer leaves biases and norms out")
    return _item(name, made[0].lineno if made else None, "no weight decay found", state="not-needed")


def _nan_filter(marks: Marks) -> Item:
    name, setting = "NaN shown in the log", marks.keyword("logging_nan_inf_filter")
    if setting is not None and isinstance(setting[1], ast.Constant) and setting[1].value is False:
        return _item(name, setting[0], "logging_nan_inf_filter is off")
    evidence = "logging_nan_inf_filter is on by default: a NaN loss is logged as a healthy number"
    return _item(name, marks.hugging_face, evidence, state="partial", fix="logging_nan_inf_filter=False")
