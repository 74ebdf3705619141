"""From a run to a reading: every pattern is looked for, the gravest is named first."""

from collections.abc import Callable

import numpy as np

from steadystep.curves.curve import Curve
from steadystep.curves.drift import drift
from steadystep.curves.held_out import held_out
from steadystep.curves.hypothetical import replay
from steadystep.curves.learning import learning
from steadystep.curves.non_finite import non_finite
from steadystep.curves.norms import norms
from steadystep.curves.oscillation import oscillation
from steadystep.curves.perfection import perfection
from steadystep.curves.plateau import plateau
from steadystep.curves.reading import Pattern, PlannedAction, Reading, ranked
from steadystep.curves.restarts import restarts
from steadystep.curves.spikes import spikes
from steadystep.curves.verdict import changes_course, verdict
from steadystep.track.run import Run

_FEWEST = 12  # points

# In the order in which equals are told.
_PATTERNS: tuple[Callable[[Curve], list[Pattern]], ...] = (
    non_finite,
    perfection,
    spikes,
    drift,
    held_out,
    learning,
    oscillation,
    plateau,
    norms,
    restarts,
)
# What the first one explains needs not be said again.
_EXPLAINS = {
    "oscillation": {"plateau", "underfitting", "not-learning", "learning-rate-too-low"},
    "not-learning": {"underfitting"},
    "learning-rate-too-low": {"plateau"},
    "hidden-nan": {"suspicious-perfection", "plateau", "non-finite-gradient"},
    "suspicious-perfection": {"plateau"},
    "learning-rate-too-high": {"not-learning", "plateau", "underfitting"},
    "divergence": {"not-learning", "plateau", "underfitting", "oscillation"},
    "spike-unhealed": {"not-learning", "plateau", "underfitting", "oscillation"},
}


def diagnose(run: Run, *, guard: bool = True) -> Reading:
    """What the curves of a run show.

    Args:
        run: from `open_run`, or any other reader.
        guard: also say what a guard would have done at each step; without it a reading of a long log is quicker.
    """
    curve = Curve.of(run)
    found: list[Pattern] = []
    with np.errstate(all="ignore"):  # huge numbers are somebody's log too
        for look in _PATTERNS if len(curve) >= _FEWEST else (non_finite, restarts):
            found += look(curve)
        plans: tuple[PlannedAction, ...] = ()
        notes = run.notes
        if guard and len(curve.raw) >= _FEWEST:
            replayed = replay(curve)
            plans = replayed.plans
            if not replayed.whole:
                notes += ("a log this long is replayed only around what stands out",)
    patterns = ranked(_distinct(found))
    return Reading(
        name=run.name,
        verdict=verdict(curve, patterns, plans, enough=len(curve.raw) >= _FEWEST),
        healthy=not any(pattern.is_trouble for pattern in patterns) and not any(map(changes_course, plans)),
        findings=patterns,
        plans=plans,
        points=len(curve.raw),
        notes=notes,
    )


def _distinct(found: list[Pattern]) -> list[Pattern]:
    explained = set[str]().union(*(_EXPLAINS.get(pattern.kind, set()) for pattern in found if pattern.until is None))
    lost = {pattern.kind for pattern in found if pattern.until is None} & {"divergence", "spike-unhealed", "non-finite"}
    kept: list[Pattern] = []
    for pattern in found:
        again = pattern.kind == "divergence" and any(k.kind in lost and k.until is None for k in kept)
        if pattern.kind not in explained and not again:
            kept.append(pattern)
    return kept
