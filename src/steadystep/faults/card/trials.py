"""The faults that a scorecard tries unless it is told others; `at` is filled in."""

from collections.abc import Mapping, Sequence
from typing import Any

from steadystep.errors import ConfigError
from steadystep.faults.kinds import KINDS
from steadystep.names import nearest_names

TRIALS: tuple[Mapping[str, Any], ...] = (
    {"kind": "grad-scale", "factor": 10},
    {"kind": "grad-scale", "factor": 10_000},
    {"kind": "grad-scale", "factor": 10, "for": "ever"},
    {"kind": "grad-sign-flip", "for": 20},
    {"kind": "bad-gradient"},
    {"kind": "bad-gradient", "value": "inf"},
    {"kind": "missing-zero-grad", "for": 20},
    {"kind": "fp16-overflow", "for": 3},
    {"kind": "fp16-underflow", "for": 20},
    {"kind": "bad-weight"},
    {"kind": "bit-flip"},
    {"kind": "frozen-layer", "for": "ever"},
    {"kind": "zeroed-layer"},
    {"kind": "dead-relus"},
    {"kind": "moments-scale", "factor": 0},
    {"kind": "moments-scale", "factor": 1000},
    {"kind": "lr-scale", "factor": 100, "for": 20},
    {"kind": "lr-scale", "factor": 30, "for": "ever"},
    {"kind": "lr-creep", "growth": 1.05},
    {"kind": "bad-loss", "for": 5},
    {"kind": "loss-drift", "per_step": 0.01},
    {"kind": "bad-input"},
    {"kind": "data-scale", "factor": 1e6},
    {"kind": "data-constant", "for": 20},
    {"kind": "shuffled-labels", "for": 20},
    {"kind": "stale-batch", "for": 20},
)


def trials(kinds: Sequence[str | Mapping[str, Any]] | None, *, at: int) -> list[dict[str, Any]]:
    """Declarations ready for `parse`: all, those of some kinds, or the user's own."""
    wanted: list[Mapping[str, Any]] = [] if kinds is not None else list(TRIALS)
    for kind in kinds or ():
        if isinstance(kind, Mapping):
            wanted.append(kind)
        elif kind in KINDS:
            wanted += [trial for trial in TRIALS if trial["kind"] == kind]
        else:
            raise ConfigError(f"kinds: {kind!r} is unknown{nearest_names(str(kind), list(KINDS), count=1)}")
    return [{"kind": trial.get("kind"), "at": at} | dict(trial) for trial in wanted]


def label(spec: Mapping[str, Any]) -> str:
    """A declaration in few words.

    >>> label({"kind": "grad-scale", "at": 200, "factor": 10, "for": 5})
    'grad-scale factor=10 for 5'
    """
    own = [f"{key}={_short(value)}" for key, value in spec.items() if key not in ("kind", "at", "for", "steps")]
    lasts = spec.get("for", spec.get("steps"))
    return " ".join([str(spec["kind"]), *own, *([] if lasts is None else [f"for {lasts}"])])


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
