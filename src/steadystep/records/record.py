"""What all records share: JSON in both directions, and the names that records refer to."""

from collections.abc import Hashable
from enum import StrEnum
from functools import cache
from typing import Any, Literal, Self, cast

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


class Action(StrEnum):
    """What a plan may ask for."""

    SKIP_STEP = "skip-step"
    LEAVE_OUT = "leave-out"
    BACK_OFF_SCALE = "back-off-scale"
    RESCALE = "rescale"
    RESTORE_MOMENTS = "restore-moments"
    RESTORE_KEPT = "restore-kept"
    COPY_REPLICA = "copy-replica"
    ROLLBACK = "rollback"
    REPLAY = "replay"
    CUT_LR = "cut-lr"
    HOLD_LR = "hold-lr"
    SKIP_BATCHES = "skip-batches"
    REWARM = "rewarm"
    STOP = "stop"

    __repr__ = str.__repr__  # why: plans are printed, and a user compares them with plain text


class DetectorName(StrEnum):
    """The detectors that come with the package; one of a user's own has any other name."""

    ATTENTION_LOGIT_GROWTH = "attention-logit-growth"
    BUFFER_JUMP = "buffer-jump"
    CLIP_RATE = "clip-rate"
    CONSTANT_PREDICTION = "constant-prediction"
    DAMAGED_STATE = "damaged-state"
    DEAD_UNITS = "dead-units"
    EARLY_DIVERGENCE = "early-divergence"
    EMBEDDING_GROWTH = "embedding-growth"
    ENTROPY_COLLAPSE = "entropy-collapse"
    FLAT_REWARD = "flat-reward"
    GRADIENT_SPIKE = "gradient-spike"
    GROWING_GRADIENT = "growing-gradient"
    INPUT_SCALE = "input-scale"
    KL_BLOW_UP = "kl-blow-up"
    LEARNING_RATE_BOUNDS = "learning-rate-bounds"
    LEARNING_RATE_CREEP = "learning-rate-creep"
    LEARNING_RATE_JUMP = "learning-rate-jump"
    LOSS_SCALE = "loss-scale"
    LOSS_SPIKE = "loss-spike"
    LOST_MOMENTS = "lost-moments"
    METRIC_BOUNDS = "metric-bounds"
    NO_LEARNING = "no-learning"
    NON_FINITE = "non-finite"
    NOT_HEALING = "not-healing"
    ODD_REPLICA = "odd-replica"
    OSCILLATION = "oscillation"
    POISONED_MOMENTS = "poisoned-moments"
    RMS_SURPRISE = "rms-surprise"
    SAME_BATCH = "same-batch"
    SATURATED_UNITS = "saturated-units"
    SHORT_WARMUP = "short-warmup"
    SLOW_DIVERGENCE = "slow-divergence"
    SUSPICIOUS_PERFECTION = "suspicious-perfection"
    UPDATE_RATIO = "update-ratio"
    VANISHING_GRADIENT = "vanishing-gradient"
    WEIGHT_JUMP = "weight-jump"
    WORSE_THAN_BEST = "worse-than-best"
    ZERO_GRADIENT = "zero-gradient"

    __repr__ = str.__repr__


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
