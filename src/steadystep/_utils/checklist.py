"""The stability checklist: its items in their order, the states of an item and their marks.

Scripts, configs, runs and the report page all fill in this one, each as far as it can tell. What a guard's settings
decide is the same for a config file and for the log of a run.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, final

ItemState = Literal["present", "partial", "absent", "not-needed", "unknown"]

MARKS: dict[ItemState, str] = {"present": "✓", "partial": "~", "absent": "✗", "not-needed": "·", "unknown": "?"}
NOT_SAID = "not in the log"

BETA2 = 0.999  # what torch's Adam has
TOO_SHORT = 0.05  # of 2 / (1 - beta2): good scripts for fine-tuning have a tenth of it, so only far below is a fault


@final
class ItemName(StrEnum):
    """The items, in the order of a training step and then of a run."""

    STEPS = "steps"
    CLIPPING = "gradient clipping"
    WARMUP = "warm-up"
    SCHEDULE = "learning-rate schedule"
    PRECISION = "mixed precision"
    NAN_CHECK = "NaN check"
    NORMS = "gradient norm watched"
    CHECKPOINTS = "checkpoints"
    VALIDATION = "validation"
    SEED = "seed"
    DECAY = "no decay on norms, biases"
    NAN_SHOWN = "NaN shown in the log"
    LEARNING_RATE = "learning rate"
    INCIDENTS = "incidents"


_ORDER = {name: place for place, name in enumerate(ItemName)}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChecklistItem:
    """One line of the checklist, with its evidence."""

    name: ItemName
    """What is checked."""
    state: ItemState
    """Whether it is present; `unknown` if that cannot be seen."""
    evidence: str
    """What the state was concluded from."""
    line: int | None = None
    """Line in the script, where there is one."""
    fix: str = ""
    """What to write, where something is missing."""

    @property
    def mark(self) -> str:
        """The state as one character."""
        return MARKS[self.state]

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def ordered_items(items: Iterable[ChecklistItem]) -> tuple[ChecklistItem, ...]:
    """As every checklist has them."""
    return tuple(sorted(items, key=lambda item: _ORDER[item.name]))


def settle_steps(beta2: float) -> float:
    """Steps that Adam's second moment takes to settle (Ma and Yarats 2019)."""
    return 2.0 / max(1.0 - beta2, 1e-9)


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
        said = "detected and logged, but not prevented (observe mode)"
        return ChecklistItem(name=name, state="partial", evidence=said, fix="mode: autopilot")
    return ChecklistItem(name=name, state="present", evidence="every step, before the update")


def _clipping(training: Mapping[str, Any], *, observes: bool) -> ChecklistItem:
    name, switch = ItemName.CLIPPING, training.get("gradient_clipping")
    limits = {key: training.get(key) for key in _LIMITS}
    said = ", ".join(f"{key} = {value}" for key, value in limits.items() if value is not None)
    if switch is not False and (said or switch):
        return ChecklistItem(name=name, state="present", evidence=said or "max_grad_norm = 1.0")
    said, fix = "disabled" if switch is False else "no fixed limit", "training: {max_grad_norm: 1.0}"
    if observes or training.get("stability_monitoring") is False:
        return ChecklistItem(name=name, state="absent", evidence=said, fix=fix)
    return ChecklistItem(name=name, state="partial", evidence=f"{said}; only outliers are limited", fix=fix)


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
        return [ChecklistItem(name=name, state="not-needed", evidence="fp32", fix=fix)]
    known = {"fp16": "fp16 with a loss scaler", "bf16": "bf16, which needs no scaler"}
    if kind not in known:
        return []
    said = known[kind] + ("; autocast is in your code" if training.get("autocast") is False else "")
    return [ChecklistItem(name=name, state="present", evidence=said)]


def _checkpoints(monitoring: Mapping[str, Any]) -> ChecklistItem:
    name, asked, fix = ItemName.CHECKPOINTS, monitoring.get("save_checkpoints"), "monitoring: {save_checkpoints: true}"
    if asked:
        every = monitoring.get("checkpoint_frequency")
        return ChecklistItem(name=name, state="present", evidence=f"checkpoint_frequency = {every}" if every else "on")
    if asked is False:
        return ChecklistItem(name=name, state="absent", evidence="disabled", fix=fix)
    fix += ", or Guard.resume"
    return ChecklistItem(name=name, state="partial", evidence="only with Guard.resume", fix=fix)
