"""Rules that turn a global gradient norm into a limit, and the clip that follows one.

A rule is plain arithmetic on plain numbers: it needs no tensors, gives the same answer on every rank, and can be asked
about a norm that somebody else has already measured.
"""

import math
from collections.abc import Mapping
from typing import Any, Protocol

from steadystep.clip.global_norm import multiply_
from steadystep.clip.gradients import Params, gradients_of, measured
from steadystep.clip.report import ClipReport


class NormRule(Protocol):
    """From the norms seen so far to a limit for the next one.

    Ask first, then tell: `limit(norm)` changes nothing, `learn(norm)` takes the norm as it was measured, before any
    clipping. A non-finite norm has the limit 0.0 and teaches nothing; neither does a norm of exactly zero, from which a
    limit of zero would follow and never go away.

    >>> from steadystep.clip import PercentileClip
    >>> rule: NormRule = PercentileClip(percentile=50)
    >>> for norm in (1.0, 2.0, 3.0):
    ...     rule.learn(norm)
    >>> rule.limit(10.0)
    2.5
    """

    def limit(self, norm: float) -> float:
        """The largest norm this step may have; `math.inf` where there is none."""

    def learn(self, norm: float) -> None:
        """Take in the norm of this step."""

    def state_dict(self) -> dict[str, Any]:
        """Everything learned so far, as plain JSON."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state` was taken."""


def teaches(norm: float) -> bool:
    """Whether a rule may learn from this norm."""
    return math.isfinite(norm) and norm > 0.0


def clip_by_rule_(params: Params, rule: NormRule) -> ClipReport:
    """Measure, ask the rule, tell it, and scale all gradients to its limit if they are above."""
    seen = measured(gradients_of(params))
    norm = seen.total().item()  # sync: the rule needs it
    if not math.isfinite(norm):
        return ClipReport.refused(norm)
    limit = rule.limit(norm)
    rule.learn(norm)
    if norm <= limit:
        return ClipReport.scaled(norm, 1.0)
    scale = limit / norm
    multiply_(seen.parts, seen.layout, scale)
    return ClipReport.scaled(norm, scale)
