"""One line of a scorecard."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, final

Verdict = Literal["harmless", "saved", "limited", "lost", "harmed", "not applicable"]
"""harmless: it came through alone. saved: only with a guard. limited: not even then, but the guard kept more than half
of the damage away. lost: it did not. harmed: it would have done better without."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How one run ended."""

    score: float
    finite: bool
    """All weights and buffers are."""
    stopped: str = ""
    """Why it ended before its last step."""
    did: Mapping[str, int] = field(default_factory=dict)
    """What the guard did, and at how many steps."""
    cause: str = ""
    """What the guard named first, from the fault on."""
    said: str = ""
    """Its evidence for that."""
    alarms_before: int = 0
    """Steps before the fault at which it raised its voice."""

    def as_well_as(self, clean: "End", tolerance: float) -> bool:
        """It reached its last step with finite weights and a score that is no worse, within the tolerance."""
        limit = clean.score + tolerance * abs(clean.score)
        return self.finite and not self.stopped and math.isfinite(self.score) and self.score <= limit

    def harm(self, clean: "End") -> float:
        """How much worse than without the fault."""
        return self.score - clean.score if self.finite and math.isfinite(self.score) else math.inf

    def ratio(self, clean: "End") -> float:
        """Its score over that of the run without a fault; NaN where there is none to speak of."""
        return self.score / clean.score if clean.score > 0 else math.nan


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fault: three runs for each seed."""

    spec: Mapping[str, Any]
    label: str
    tolerance: float
    clean: tuple[End, ...] = ()
    unguarded: tuple[End, ...] = ()
    guarded: tuple[End, ...] = ()
    why_not: str = ""
    """Why this training cannot have this fault."""

    @property
    def survived_unguarded(self) -> int:
        """Seeds at which the run came through without a guard."""
        return sum(a.as_well_as(b, self.tolerance) for a, b in zip(self.unguarded, self.clean, strict=True))

    @property
    def survived_guarded(self) -> int:
        """Seeds at which it came through with one."""
        return sum(a.as_well_as(b, self.tolerance) for a, b in zip(self.guarded, self.clean, strict=True))

    @property
    def verdict(self) -> Verdict:
        """Over all seeds: "harmed" when the guard came through fewer of them than the run alone."""
        if self.why_not:
            return "not applicable"
        if self.survived_guarded < self.survived_unguarded:
            return "harmed"
        if self.survived_unguarded == len(self.clean):
            return "harmless"
        if self.survived_guarded == len(self.clean):
            return "saved"
        return "limited" if self._limited else "lost"

    @property
    def _limited(self) -> bool:
        guarded, alone = (
            [end.harm(clean) for end, clean in zip(ends, self.clean, strict=True)]
            for ends in (self.guarded, self.unguarded)
        )
        stopped = any(end.stopped for end in self.guarded)
        return not stopped and sum(guarded) < 0.5 * sum(alone)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what is not finite is None."""
        runs = {"clean": self.clean, "unguarded": self.unguarded, "guarded": self.guarded}
        return {
            "fault": self.label,
            "spec": {key: _plain(value) for key, value in self.spec.items()},
            "verdict": self.verdict,
            "why_not": self.why_not,
            "survived_unguarded": self.survived_unguarded,
            "survived_guarded": self.survived_guarded,
            **{
                name: [_end(end, clean) for end, clean in zip(ends, self.clean, strict=True)]
                for name, ends in runs.items()
            },
        }


def _end(end: End, clean: End) -> dict[str, Any]:
    return {
        "score": _plain(end.score),
        "ratio": _plain(end.ratio(clean)),
        "finite": end.finite,
        "stopped": end.stopped,
        "did": dict(end.did),
        "cause": end.cause,
        "said": end.said,
        "alarms_before": end.alarms_before,
    }


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
