"""The items of the checklist that are about one training step."""

import ast
from collections.abc import Collection
from typing import final

from steadystep._utils.checklist import BETA2, ChecklistItem, ItemName, ItemState, settle_steps
from steadystep.lint.context import Context
from steadystep.lint.names import name_of

_TRAINERS = ("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig", "DPOConfig", "GRPOConfig", "PPOConfig")


@final
class Marks:
    """Looks things up by name; each answer is a line."""

    def __init__(self, context: Context) -> None:
        self._script = context.script
        self.guard = (
            self.call("Guard", "StabilityCallback")
            or self._watched()
            or next((e.line for e in context.events("guard")), None)
        )
        self.hugging_face = self.call(*_TRAINERS)
        self.lightning = self.call("Fabric") or next(
            (c.lineno for c in self._script.classes.values() for b in c.bases if "Lightning" in name_of(b)),
            None,
        )

    def _watched(self) -> int | None:
        """`steadystep.watch(...)`, under whatever name; others have a `watch` too."""
        calls = [c for c in self._script.calls.get("watch", ()) if self._script.full(c.func).startswith("steadystep")]
        return min((c.lineno for c in calls), default=None)

    def call(self, *names: str) -> int | None:
        """The first call of any of these."""
        lines = [c.lineno for name in names for c in self._script.calls.get(name, ())]
        return min(lines, default=None)

    def keyword(self, *names: str) -> tuple[int, ast.expr] | None:
        """The first call that is given any of these by name, or a dictionary with such a key."""
        for node in self._script.nodes:
            if isinstance(node, ast.keyword) and node.arg in names:
                return node.value.lineno, node.value
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value in names:
                        return key.lineno, value
        return None

    def word(self, part: str, *, but_not: Collection[int] = ()) -> int | None:
        """The first name with this in it, on a line that is not excluded."""
        lines = {_line(node) for node in self._script.nodes if part in _word(node)}
        return min(lines - set(but_not), default=None)


def _word(node: ast.AST) -> str:
    match node:
        case ast.Name(id=word) | ast.Attribute(attr=word) | ast.FunctionDef(name=word) | ast.arg(arg=word):
            return word.lower()
        case ast.keyword(arg=str(word)):
            return word.lower()
        case _:
            return ""


def _line(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 1))


def item(
    name: ItemName, line: int | None, evidence: str, *, state: ItemState = "present", fix: str = ""
) -> ChecklistItem:
    """A line of the checklist."""
    return ChecklistItem(name=name, state=state, evidence=evidence, line=line, fix=fix)


def clipping(context: Context, marks: Marks) -> ChecklistItem:
    """Whether gradients are clipped."""
    name = ItemName.CLIPPING
    clip = next(context.events("clip"), None)
    if clip is not None:
        return item(name, clip.line, "clipped")
    setting = marks.keyword("gradient_clip_val", "max_grad_norm", "grad_clip", "clip_grad")
    if setting is not None:
        return item(name, setting[0], f"set to {ast.unparse(setting[1])}")
    if own := marks.word("clip_grad"):
        return item(name, own, "a function of your own")
    if marks.hugging_face:
        return item(name, marks.hugging_face, "the Trainer's default, max_grad_norm = 1.0")
    fix = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)   # after backward()"
    if marks.guard:
        fix = 'steadystep.Guard(model, optimizer, config={"training": {"max_grad_norm": 1.0}})'
        return item(name, marks.guard, "no fixed limit; the guard limits outliers", state="partial", fix=fix)
    return item(name, None, "none found", state="absent", fix=fix)


def warmup_found(context: Context, marks: Marks) -> ChecklistItem:
    """Whether the rate begins low."""
    name = ItemName.WARMUP
    setting = marks.keyword("num_warmup_steps", "warmup_steps", "warmup_ratio", "warmup_t", "warmup_iters")
    if setting is not None:
        value = setting[1].value if isinstance(setting[1], ast.Constant) else None
        if value in (0, 0.0):
            return item(name, setting[0], "disabled", state="absent", fix="warmup_steps: 5 to 10 % of all steps")
        if isinstance(value, int) and value < settle_steps(BETA2) / 4:
            evidence = f"{value} steps; Adam's second moment settles in about {settle_steps(BETA2):.0f} (beta2 0.999)"
            return item(name, setting[0], evidence, state="partial", fix="a longer one, or beta2 = 0.95")
        return item(name, setting[0], ast.unparse(setting[1]))
    for called, calls in context.script.calls.items():
        if "warmup" in called:
            return item(name, calls[0].lineno, called)
    if line := marks.word("warmup"):
        return item(name, line, "by hand")
    if line := marks.call("OneCycleLR", "LinearLR", "CyclicLR"):
        return item(name, line, "the schedule starts low")
    fix = "torch.optim.lr_scheduler.LinearLR(optimizer, 1e-3, total_iters=2000), then the decay"
    return item(name, None, "none found", state="absent", fix=fix)


def schedule(context: Context, marks: Marks) -> ChecklistItem:
    """Whether the rate changes."""
    name = ItemName.SCHEDULE
    for calls in context.script.calls.values():
        for call in calls:
            if context.roles.made_by(call) == "scheduler":
                return item(name, call.lineno, name_of(call.func).rpartition(".")[2])
    for node in context.script.nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            key = node.targets[0].slice
            if isinstance(key, ast.Constant) and key.value == "lr":
                return item(name, node.lineno, "set by hand")
    if setting := marks.keyword("lr_scheduler", "lr_scheduler_type"):
        return item(name, setting[0], ast.unparse(setting[1]))
    if event := next(context.events("schedule"), None):
        return item(name, event.line, "stepped here")
    if marks.hugging_face:
        return item(name, marks.hugging_face, "the Trainer's default, linear")
    fix = "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)"
    return item(name, None, "a constant learning rate", state="absent", fix=fix)


def precision(context: Context, marks: Marks) -> ChecklistItem:
    """Mixed precision, and its scaler."""
    name = ItemName.PRECISION
    scaler, cast = marks.call("GradScaler"), marks.call("autocast")
    if cast and scaler:
        return item(name, cast, f"autocast, scaler at line {scaler}")
    if cast:
        return item(name, cast, "autocast")
    for setting in (marks.keyword("mixed_precision", "precision"), marks.keyword("bf16", "fp16")):
        if setting is not None:
            return item(name, setting[0], ast.unparse(setting[1]))
    fix = 'with torch.autocast("cuda", dtype=torch.bfloat16): ...   # needs no scaler'
    return item(name, None, "fp32", state="not-needed", fix=fix)


def nan_check(context: Context, marks: Marks) -> ChecklistItem:
    """Whether anything looks for NaN."""
    name = ItemName.NAN_CHECK
    if marks.guard:
        return item(name, marks.guard, "the guard checks every update")
    if line := marks.call("detect_anomaly", "set_detect_anomaly"):
        return item(name, line, "checked")
    looked = sorted(c.lineno for word in ("isfinite", "isnan", "isinf") for c in context.script.calls.get(word, ()))
    if line := next((line for line in looked if _while_training(context, line)), None):
        return item(name, line, "checked")
    if setting := marks.keyword("error_if_nonfinite", "detect_anomaly"):
        return item(name, setting[0], "requested")
    fix = "steadystep.Guard(model, optimizer).step(lambda: loss_fn(model(x), y))"
    if event := next(context.events("scaler-step"), None):
        evidence = "the scaler skips infinite gradients; a NaN loss is not distinguished"
        return item(name, event.line, evidence, state="partial", fix=fix)
    if looked:
        return item(name, looked[0], "only after the loop: by then the weights are NaN", state="partial", fix=fix)
    return item(name, None, "none found: one NaN reaches the weights", state="absent", fix=fix)


def _while_training(context: Context, line: int) -> bool:
    """In a loop, or in a function that a loop may call; not on the lines after one."""

    def around(kind: type[ast.AST] | tuple[type[ast.AST], ...]) -> list[ast.AST]:
        return [n for n in context.script.nodes if isinstance(n, kind) and _spans(n, line)]

    if around((ast.For, ast.While, ast.comprehension)):
        return True
    functions = around(ast.FunctionDef)
    return bool(functions) and not any(isinstance(n, ast.For | ast.While) for n in ast.walk(functions[-1]))


def _spans(node: ast.AST, line: int) -> bool:
    return getattr(node, "lineno", line + 1) <= line <= (getattr(node, "end_lineno", None) or 0)


def norm_watching(context: Context, marks: Marks) -> ChecklistItem:
    """Whether the gradient norm is kept or logged."""
    name = ItemName.NORMS
    if marks.guard:
        return item(name, marks.guard, "measured and logged by the guard")
    for clip in context.events("clip"):
        if not isinstance(clip.stmt, ast.Expr):
            return item(name, clip.line, "the norm returned by clipping is used")
    clipped = {c.lineno for word in ("clip_grad_norm_", "clip_grad_norm") for c in context.script.calls.get(word, ())}
    if line := marks.word("grad_norm", but_not=clipped):
        return item(name, line, "measured")
    if marks.hugging_face:
        return item(name, marks.hugging_face, "the Trainer logs grad_norm")
    fix = "norm = torch.nn.utils.clip_grad_norm_(...)   # returns it: log it"
    return item(name, None, "not logged", state="absent", fix=fix)
