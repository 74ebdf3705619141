"""The items of the checklist that a guard's settings decide, the same for a config file and for the log of a run."""

from collections.abc import Mapping
from typing import Any

from steadystep._utils.checklist import BETA2, TOO_SHORT, ChecklistItem, ItemName, settle_steps

_LIMITS = ("max_grad_norm", "max_grad_value", "clip_rule")


def asked_for(settings: Mapping[str, Any]) -> dict[ItemName, ChecklistItem]:
    """From settings nested as in the YAML; nothing about what they leave out."""
    training, monitoring = section(settings, "training"), section(settings, "monitoring")
    observes = settings.get("mode") == "observe"
    found = [_nan_check(observes=observes)] if settings else []
    if training:
        found += [_clipping(training, observes=observes), _warmup(training), _schedule(training)]
        found += _precision(training)
    if monitoring:
        found.append(_checkpoints(monitoring))
    return {item.name: item for item in found}


def section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of the settings; empty where a log has something else there."""
    found = settings.get(name, {})
    return found if isinstance(found, Mapping) else {}


def _nan_check(*, observes: bool) -> ChecklistItem:
    name = ItemName.NAN_CHECK
    if observes:
        said = "seen and logged, but not held back (observe mode)"
        return ChecklistItem(name=name, state="partial", evidence=said, fix="mode: autopilot")
    return ChecklistItem(name=name, state="present", evidence="every step, before the update")


def _clipping(training: Mapping[str, Any], *, observes: bool) -> ChecklistItem:
    name, switch = ItemName.CLIPPING, training.get("gradient_clipping")
    limits = {key: training.get(key) for key in _LIMITS}
    said = ", ".join(f"{key} = {value}" for key, value in limits.items() if value is not None)
    if switch is not False and (said or switch):
        return ChecklistItem(name=name, state="present", evidence=said or "max_grad_norm = 1.0")
    said, fix = "switched off" if switch is False else "no fixed limit", "training: {max_grad_norm: 1.0}"
    if observes or training.get("stability_monitoring") is False:
        return ChecklistItem(name=name, state="absent", evidence=said, fix=fix)
    return ChecklistItem(name=name, state="partial", evidence=f"{said}; only outliers are held back", fix=fix)


def _warmup(training: Mapping[str, Any]) -> ChecklistItem:
    name, asked, total = ItemName.WARMUP, training.get("warmup_steps"), training.get("total_steps")
    if not asked:
        return ChecklistItem(name=name, state="absent", evidence="none", fix="training: {warmup_steps: 0.05}")
    said = f"warmup_steps = {asked}"
    if not isinstance(total, int | float) or not isinstance(asked, int | float) or total <= 0:
        return ChecklistItem(name=name, state="present", evidence=said)
    steps, needed = asked * total if asked < 1 else asked, settle_steps(BETA2)
    if steps < TOO_SHORT * needed and steps < 0.03 * total:
        said = f"{steps:.0f} steps; Adam's second moment (beta2 0.999) settles in about {needed:.0f}"
        return ChecklistItem(name=name, state="partial", evidence=said, fix="a longer one, or beta2 = 0.95")
    return ChecklistItem(name=name, state="present", evidence=f"{said}: {steps / total:.0%} of the updates")


def _schedule(training: Mapping[str, Any]) -> ChecklistItem:
    name, asked, total = ItemName.SCHEDULE, training.get("lr_scheduler"), training.get("total_steps")
    if not asked:
        return ChecklistItem(name=name, state="absent", evidence="none", fix="training: {lr_scheduler: cosine}")
    over = f" over {total:,} updates" if isinstance(total, int) else ""
    return ChecklistItem(name=name, state="present", evidence=f"lr_scheduler = {asked}{over}")


def _precision(training: Mapping[str, Any]) -> list[ChecklistItem]:
    name, kind = ItemName.PRECISION, training.get("mixed_precision")
    if kind == "fp32":
        # why not absent: nothing that keeps a run stable is missing, only speed
        fix = "training: {mixed_precision: bf16}"
        return [ChecklistItem(name=name, state="not-needed", evidence="fp32 throughout", fix=fix)]
    known = {"fp16": "fp16 with a loss scaler", "bf16": "bf16, which needs no scaler"}
    if kind not in known:
        return []
    said = known[kind] + ("; autocast is left to your code" if training.get("autocast") is False else "")
    return [ChecklistItem(name=name, state="present", evidence=said)]


def _checkpoints(monitoring: Mapping[str, Any]) -> ChecklistItem:
    name, asked, fix = ItemName.CHECKPOINTS, monitoring.get("save_checkpoints"), "monitoring: {save_checkpoints: true}"
    if asked:
        every = monitoring.get("checkpoint_frequency")
        return ChecklistItem(name=name, state="present", evidence=f"checkpoint_frequency = {every}" if every else "on")
    if asked is False:
        return ChecklistItem(name=name, state="absent", evidence="switched off", fix=fix)
    fix += ", or Guard.resume"
    return ChecklistItem(name=name, state="partial", evidence="only with Guard.resume", fix=fix)
