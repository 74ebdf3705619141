"""The checklist for a script: each item with the line it was concluded from. Absence is no fault, so none is a hit."""

import ast
from collections.abc import Iterator

from steadystep._utils.checklist import ChecklistItem, ItemName
from steadystep.lint.checklist_step import (
    Marks,
    clipping,
    item,
    nan_check,
    norm_watching,
    precision,
    schedule,
    warmup_found,
)
from steadystep.lint.context import Context
from steadystep.lint.names import argument, name_of
from steadystep.lint.rules.decay import groups_of


def checkpoints(context: Context, marks: Marks) -> ChecklistItem:
    """Whether the run can be taken up again."""
    name = ItemName.CHECKPOINTS
    if line := marks.call("save_checkpoint", "save_state", "ModelCheckpoint", "dcp_save"):
        return item(name, line, "saved")
    if marks.guard and (line := marks.call("resume")):
        return item(name, line, "by the guard")
    if marks.guard and (setting := marks.keyword("save_checkpoints")):
        return item(name, setting[0], "by the guard")
    saves = sorted(context.script.calls.get("save", ()), key=lambda c: c.lineno)
    for call in saves:
        given = argument(call, 0, "obj")
        text = ast.unparse(call).lower()
        values = context.script.values(name_of(given), call) if given is not None and name_of(given) else []
        if "optim" in text or "opt" in text or any("optim" in ast.unparse(v).lower() for v in values):
            return item(name, call.lineno, "model and optimizer")
    if saves:
        fix = 'torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)'
        return item(name, saves[0].lineno, "weights only: no exact resume", state="partial", fix=fix)
    if line := marks.call("save_pretrained"):
        return item(name, line, "weights only: no exact resume", state="partial", fix="save the optimizer too")
    if line := marks.hugging_face or marks.lightning:
        return item(name, line, "the trainer's default")
    fix = 'torch.save({"model": ..., "optimizer": ...}, path)'
    if marks.call("Guard"):
        fix = "guard = steadystep.Guard.resume(model, optimizer, run_dir=...)   # saves checkpoints and resumes"
    return item(name, None, "none found", state="absent", fix=fix)


def validation(context: Context, marks: Marks) -> ChecklistItem:
    """Whether anything is measured on held-out data."""
    name = ItemName.VALIDATION
    if event := next(context.events("eval"), None):
        return item(name, event.line, "evaluated in eval mode")
    if line := marks.call("validate", "evaluate", "eval") or marks.word("validation_step"):
        return item(name, line, "evaluated")
    if setting := marks.keyword("eval_dataset", "val_dataloaders", "eval_strategy"):
        return item(name, setting[0], "given to the trainer")
    return item(
        name, None, "none found: overfitting would be invisible", state="absent", fix="evaluate on held-out data"
    )


def seed(context: Context, marks: Marks) -> ChecklistItem:
    """Whether it is set."""
    line = marks.call("manual_seed", "set_seed", "seed_everything", "manual_seed_all") or marks.word("seed")
    if line or marks.hugging_face:
        return item(ItemName.SEED, line or marks.hugging_face, "set" if line else "the Trainer's default, 42")
    fix = "torch.manual_seed(0)   # before the model is created"
    return item(ItemName.SEED, None, "none: runs are not reproducible", state="absent", fix=fix)


def decay(context: Context, marks: Marks) -> ChecklistItem:
    """Whether norms and biases are spared."""
    name = ItemName.DECAY
    made = [c for calls in context.script.calls.values() for c in calls if context.roles.is_optimizer(c)]
    for call in made:
        kind = context.script.full(call.func).rpartition(".")[2]
        given = next((k.value for k in call.keywords if k.arg == "weight_decay"), None)
        off = isinstance(given, ast.Constant) and given.value in (0, 0.0)
        if not context.roles.model_of(call) or groups_of(context.script, call):
            return item(name, call.lineno, "parameter groups")
        if (given is not None and not off) or (given is None and kind == "AdamW"):
            evidence = "all parameters are decayed; common, and rarely a problem"
            fix = "steadystep.groups, or two groups: p.ndim >= 2 with decay, the rest without"
            return item(name, call.lineno, evidence, state="partial", fix=fix)
    if marks.hugging_face:
        return item(name, marks.hugging_face, "the Trainer excludes biases and norms")
    return item(name, made[0].lineno if made else None, "no weight decay found", state="not-needed")


def nan_filter(marks: Marks) -> ChecklistItem:
    """The Trainer's filter, which is on by default."""
    name, setting = ItemName.NAN_SHOWN, marks.keyword("logging_nan_inf_filter")
    if setting is not None and isinstance(setting[1], ast.Constant) and setting[1].value is False:
        return item(name, setting[0], "logging_nan_inf_filter is off")
    evidence = "logging_nan_inf_filter is on by default: a NaN loss is logged as a finite number"
    return item(name, marks.hugging_face, evidence, state="partial", fix="logging_nan_inf_filter=False")


_ITEMS = (clipping, warmup_found, schedule, precision, nan_check, norm_watching, checkpoints, validation, seed, decay)


def script_checklist(context: Context) -> Iterator[ChecklistItem]:
    """All items, in the order of a training step; nothing for a script that does not train."""
    marks = Marks(context)
    if not (context.trains or marks.hugging_face or marks.lightning):
        return
    for find in _ITEMS:
        yield find(context, marks)
    if marks.hugging_face:
        yield nan_filter(marks)
