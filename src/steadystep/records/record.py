"""What all records share: JSON in both directions, and the names that records refer to."""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Final, Literal, Self, cast, final

from pydantic import ConfigDict, TypeAdapter, ValidationError

from steadystep._deprecated import new_keys

Severity = Literal["info", "warn", "act", "critical"]
"""How serious a finding is."""
SEVERITIES: tuple[Severity, ...] = ("info", "warn", "act", "critical")
"""All severities, from the mildest to the most serious."""
LOUD: tuple[Severity, ...] = SEVERITIES[1:]
"""Severities that are reported: all but "info"."""
GRAVE: tuple[Severity, ...] = SEVERITIES[2:]
"""Severities that ask for an intervention: "act" and "critical"."""
_RANKS = {severity: rank for rank, severity in enumerate(SEVERITIES)}


def severity_rank(severity: str) -> int:
    """Return the rank of a severity, from 0; a name from another version's log counts as "info".

    Args:
        severity: one of `SEVERITIES`.

    >>> severity_rank("info"), severity_rank("critical"), severity_rank("odd")
    (0, 3, 0)
    """
    return _RANKS.get(cast("Severity", severity), 0)


class Damage(StrEnum):
    """How far a fault has reached. The response is chosen by this, not by the severity of the alarm."""

    NONE = "none"
    """Nothing was changed; skipping the update is enough."""
    MOMENTS = "moments"
    """The optimizer's moments are damaged."""
    WEIGHTS = "weights"
    """The weights are damaged."""


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
    "raise-coefficient",
    "stop",
]
"""Names of the actions that a plan may contain; `Action` describes them."""


class Action:
    """Names of the actions that a plan may contain, as they appear in plans and logs."""

    SKIP_STEP: Final[ActionName] = "skip-step"
    """Do not apply this update."""
    LEAVE_OUT: Final[ActionName] = "leave-out"
    """Recompute the update without the micro-batches that are not finite."""
    BACK_OFF_SCALE: Final[ActionName] = "back-off-scale"
    """Do not apply this update and lower the fp16 loss scale."""
    RESCALE: Final[ActionName] = "rescale"
    """Scale the gradients down to `Plan.norm`, then apply the update."""
    RESTORE_MOMENTS: Final[ActionName] = "restore-moments"
    """Restore the optimizer's moments from a snapshot."""
    RESTORE_KEPT: Final[ActionName] = "restore-kept"
    """Restore tensors of objects given to `Guard.keep`."""
    COPY_REPLICA: Final[ActionName] = "copy-replica"
    """Copy weights and moments from the rank `Plan.rank` to all others."""
    ROLLBACK: Final[ActionName] = "rollback"
    """Restore weights, moments and buffers from a trusted snapshot."""
    REPLAY: Final[ActionName] = "replay"
    """Apply the updates since the snapshot again, from remembered batches."""
    CUT_LR: Final[ActionName] = "cut-lr"
    """Limit the learning rate to `Plan.lr` because an update caused damage."""
    HOLD_LR: Final[ActionName] = "hold-lr"
    """Limit the learning rate to `Plan.lr` because it rose unannounced."""
    SKIP_BATCHES: Final[ActionName] = "skip-batches"
    """Continue with the loop's next batches; without it the loop gives the same ones again."""
    REWARM: Final[ActionName] = "rewarm"
    """Raise the learning rate from a tenth to its value over `recovery.rewarm_steps` updates."""
    RAISE_COEFFICIENT: Final[ActionName] = "raise-coefficient"
    """Raise the coefficient `Plan.raises` of the policy's loss, through `steadystep.rl.Controls`."""
    STOP: Final[ActionName] = "stop"
    """Stop the run with `TrainingHalted`."""


class DetectorName:
    """Names of the built-in detectors, as they appear in findings and logs. A detector of your own has another name."""

    ATTENTION_LOGIT_GROWTH: Final = "attention-logit-growth"
    BUFFER_JUMP: Final = "buffer-jump"
    CLIP_RATE: Final = "clip-rate"
    CONSTANT_PREDICTION: Final = "constant-prediction"
    BIT_FLIP: Final = "bit-flip"
    DAMAGED_STATE: Final = "damaged-state"
    BAD_ADVANTAGES: Final = "bad-advantages"
    DEAD_GROUPS: Final = "dead-groups"
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
    MISCOMPUTATION: Final = "miscomputation"
    METRIC_BOUNDS: Final = "metric-bounds"
    NO_LEARNING: Final = "no-learning"
    NON_FINITE: Final = "non-finite"
    NOT_HEALING: Final = "not-healing"
    ODD_REPLICA: Final = "odd-replica"
    OSCILLATION: Final = "oscillation"
    POISONED_MOMENTS: Final = "poisoned-moments"
    POLICY_MISMATCH: Final = "policy-mismatch"
    RATIO_EXPLOSION: Final = "ratio-explosion"
    REWARD_COLLAPSE: Final = "reward-collapse"
    REWARD_HACKING: Final = "reward-hacking"
    RMS_SURPRISE: Final = "rms-surprise"
    SAME_BATCH: Final = "same-batch"
    SATURATED_UNITS: Final = "saturated-units"
    SHORT_WARMUP: Final = "short-warmup"
    SLOW_DIVERGENCE: Final = "slow-divergence"
    SUSPICIOUS_PERFECTION: Final = "suspicious-perfection"
    UPDATE_RATIO: Final = "update-ratio"
    VALUE_DIVERGENCE: Final = "value-divergence"
    VANISHING_GRADIENT: Final = "vanishing-gradient"
    WEIGHT_JUMP: Final = "weight-jump"
    WORSE_THAN_BEST: Final = "worse-than-best"
    ZERO_GRADIENT: Final = "zero-gradient"


class Record:
    """Base class of the records: conversion to JSON and back."""

    __slots__ = ()

    def to_json(self) -> str:
        """Return this record as one line of JSON."""
        return _adapter(cast(Hashable, type(self))).dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the record that `to_json` wrote.

        Args:
            text: one line of JSON.
        """
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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined(Record):
    """One step whose batches are not in the weights: refused, or undone and not replayed."""

    __pydantic_config__ = JSON

    step: int
    """The optimizer step."""
    cause: str
    """Value of a `steadystep.diagnosis.Cause`."""
    epoch: int | None = None
    """Pass over the data, counted by `guard.batches`; None without it."""
    batches: tuple[int, ...] = ()
    """Numbers of the batches within that pass, from 0; empty without `guard.batches`."""
