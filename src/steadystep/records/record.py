"""What all records share: JSON in both directions, and the names that records refer to."""

from collections.abc import Hashable
from enum import StrEnum
from functools import cache
from typing import Any, Final, Literal, Self, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

from steadystep._deprecated import new_keys

Severity = Literal["info", "warn", "act", "critical"]
SEVERITIES: tuple[Severity, ...] = ("info", "warn", "act", "critical")
"""From a note to what cannot wait."""
LOUD, GRAVE = SEVERITIES[1:], SEVERITIES[2:]
"""More than a note; more than a warning."""
_RANKS = {severity: rank for rank, severity in enumerate(SEVERITIES)}


def severity_rank(severity: str) -> int:
    """How grave, from 0; what is no severity, in a log of another version, counts as a note.

    >>> severity_rank("info"), severity_rank("critical"), severity_rank("odd")
    (0, 3, 0)
    """
    return _RANKS.get(cast("Severity", severity), 0)


class Damage(StrEnum):
    """What the trouble has reached; the response is chosen by this, not by how loud the alarm is."""

    NONE = "none"
    MOMENTS = "moments"
    WEIGHTS = "weights"


ActionName = Literal[
    "skip-step",
    "leave-out",
    "back-off-scale",
    "rescale",
    "restore-moments",
    "restore-kept",
    "copy-replica",
    "rollback",
    "replay",
    "cut-lr",
    "hold-lr",
    "skip-batches",
    "rewarm",
    "stop",
]


class Action:
    """What a plan may ask for. Plain texts, as they stand in plans and logs; a misspelt name is a type error."""

    SKIP_STEP: Final[ActionName] = "skip-step"
    LEAVE_OUT: Final[ActionName] = "leave-out"
    BACK_OFF_SCALE: Final[ActionName] = "back-off-scale"
    RESCALE: Final[ActionName] = "rescale"
    RESTORE_MOMENTS: Final[ActionName] = "restore-moments"
    RESTORE_KEPT: Final[ActionName] = "restore-kept"
    COPY_REPLICA: Final[ActionName] = "copy-replica"
    ROLLBACK: Final[ActionName] = "rollback"
    REPLAY: Final[ActionName] = "replay"
    CUT_LR: Final[ActionName] = "cut-lr"
    HOLD_LR: Final[ActionName] = "hold-lr"
    SKIP_BATCHES: Final[ActionName] = "skip-batches"
    REWARM: Final[ActionName] = "rewarm"
    STOP: Final[ActionName] = "stop"


class DetectorName:
    """The detectors that come with the package; one of a user's own has any other name."""

    ATTENTION_LOGIT_GROWTH: Final = "attention-logit-growth"
    BUFFER_JUMP: Final = "buffer-jump"
    CLIP_RATE: Final = "clip-rate"
    CONSTANT_PREDICTION: Final = "constant-prediction"
    DAMAGED_STATE: Final = "damaged-state"
    DEAD_UNITS: Final = "dead-units"
    EARLY_DIVERGENCE: Final = "early-divergence"
    EMBEDDING_GROWTH: Final = "embedding-growth"
    ENTROPY_COLLAPSE: Final = "entropy-collapse"
    FLAT_REWARD: Final = "flat-reward"
    GRADIENT_SPIKE: Final = "gradient-spike"
    GROWING_GRADIENT: Final = "growing-gradient"
    INPUT_SCALE: Final = "input-scale"
    KL_BLOW_UP: Final = "kl-blow-up"
    LEARNING_RATE_BOUNDS: Final = "learning-rate-bounds"
    LEARNING_RATE_CREEP: Final = "learning-rate-creep"
    LEARNING_RATE_JUMP: Final = "learning-rate-jump"
    LOSS_SCALE: Final = "loss-scale"
    LOSS_SPIKE: Final = "loss-spike"
    LOST_MOMENTS: Final = "lost-moments"
    METRIC_BOUNDS: Final = "metric-bounds"
    NO_LEARNING: Final = "no-learning"
    NON_FINITE: Final = "non-finite"
    NOT_HEALING: Final = "not-healing"
    ODD_REPLICA: Final = "odd-replica"
    OSCILLATION: Final = "oscillation"
    POISONED_MOMENTS: Final = "poisoned-moments"
    RMS_SURPRISE: Final = "rms-surprise"
    SAME_BATCH: Final = "same-batch"
    SATURATED_UNITS: Final = "saturated-units"
    SHORT_WARMUP: Final = "short-warmup"
    SLOW_DIVERGENCE: Final = "slow-divergence"
    SUSPICIOUS_PERFECTION: Final = "suspicious-perfection"
    UPDATE_RATIO: Final = "update-ratio"
    VANISHING_GRADIENT: Final = "vanishing-gradient"
    WEIGHT_JUMP: Final = "weight-jump"
    WORSE_THAN_BEST: Final = "worse-than-best"
    ZERO_GRADIENT: Final = "zero-gradient"


class Record:
    """JSON in both directions, for every record."""

    __slots__ = ()

    def to_json(self) -> str:
        """This record as one line of JSON."""
        return _adapter(cast(Hashable, type(self))).dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The record that `to_json` wrote."""
        adapter = _adapter(cast(Hashable, cls))
        try:
            record: Self = adapter.validate_json(text)
        except ValidationError:
            record = adapter.validate_json(new_keys(text))
        return record


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


# pydantic reads this attribute of a dataclass; it costs the records nothing.
JSON = ConfigDict(ser_json_inf_nan="strings", extra="forbid")
