"""The stability checklist: its items in their order, the states of an item and their marks.

Scripts, configs, runs and the report page all fill in this one, each as far as it can tell.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, final

ItemState = Literal["present", "partial", "absent", "not-needed", "unknown"]

MARKS: dict[ItemState, str] = {"present": "✓", "partial": "~", "absent": "✗", "not-needed": "·", "unknown": "?"}
NOT_SAID = "the log does not say"

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
    """One line of the checklist, with what it was concluded from."""

    name: ItemName
    state: ItemState
    evidence: str
    line: int | None = None
    fix: str = ""
    """What to write, where something is missing."""

    @property
    def mark(self) -> str:
        """The state as one character."""
        return MARKS[self.state]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def ordered_items(items: Iterable[ChecklistItem]) -> tuple[ChecklistItem, ...]:
    """As every checklist has them."""
    return tuple(sorted(items, key=lambda item: _ORDER[item.name]))


def settle_steps(beta2: float) -> float:
    """Steps that Adam's second moment takes to settle (Ma and Yarats 2019)."""
    return 2.0 / max(1.0 - beta2, 1e-9)
