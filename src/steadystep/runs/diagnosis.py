"""From a run to a reading: every pattern is looked for, the gravest is named first."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from steadystep.diagnosis.advice import ADVICE
from steadystep.diagnosis.causes import Cause
from steadystep.runs.curve import Curve
from steadystep.runs.drift import drift, held_out, oscillation
from steadystep.runs.hypothetical import hypothetical_run
from steadystep.runs.norms import non_finite, norms
from steadystep.runs.plateau import learning, perfection, plateau
from steadystep.runs.reading import (
    FEWEST_EPOCHS,
    FEWEST_POINTS,
    Pattern,
    PlannedAction,
    Reading,
    fell,
    is_enough,
    is_resumed,
    ranked,
    too_short,
    unjudged_objective,
    verdict,
)
from steadystep.runs.run import Run
from steadystep.runs.spikes import ends_above, from_the_start, restarts, spikes

# In the order in which equals are told.
_PATTERNS: tuple[Callable[[Curve], list[Pattern]], ...] = (
    non_finite,
    perfection,
    from_the_start,
    spikes,
    drift,
    held_out,
    learning,
    oscillation,
    plateau,
    norms,
    restarts,
)
_ALWAYS = (non_finite, restarts)
_FEW = (non_finite, perfection, from_the_start, held_out, restarts)
_ANY_OBJECTIVE = (non_finite, norms, restarts)
_ABOUT_THE_START = (from_the_start, learning)
_ENDS_HIGH = {"divergence", "spike-unhealed", "non-finite", "learning-rate-too-high"}
# What the first one explains needs not be said again.
_EXPLAINS = {
    "oscillation": {"plateau", "underfitting", "not-learning", "learning-rate-too-low"},
    "not-learning": {"underfitting"},
    "learning-rate-too-low": {"plateau"},
    "hidden-nan": {"suspicious-perfection", "plateau", "non-finite-gradient"},
    "suspicious-perfection": {"plateau"},
    "learning-rate-too-high": {"not-learning", "plateau", "underfitting"},
    "learning-rate-too-high from the start": {"spike-unhealed", "spike-healed", "divergence", "oscillation"},
    "divergence": {"not-learning", "plateau", "underfitting", "oscillation"},
    "spike-unhealed": {"not-learning", "plateau", "underfitting", "oscillation"},
}


def diagnose(run: Run, *, guard: bool = True) -> Reading:
    """Diagnose the curves of a run.

    Args:
        run: from `open_run` or `steadystep.tracking.read`.
        guard: also report what a guard would have done at each step; False is quicker for a long log.
    """
    curve = Curve.of(run)
    objective = unjudged_objective(run) or ("a loss of both signs" if curve.signed else "")
    with np.errstate(all="ignore"):  # huge numbers are somebody's log too
        found = _found(curve, objective)
        plans: tuple[PlannedAction, ...] = ()
        notes = run.notes
        if guard and len(curve.raw) >= FEWEST_POINTS:
            replayed = hypothetical_run(curve)
            plans = tuple(plan for plan in replayed.plans if not objective or plan.reason.startswith("non-finite"))
            if not replayed.whole:
                notes += ("the log is long: only the stretches around anomalies were simulated",)
        late = is_resumed(curve)
        patterns = ranked([_for_run(pattern, run, resumed=late) for pattern in _distinct(found)])
        patterns = _with_guard(patterns, run)
        unjudged = objective or _unjudged(curve, resumed=late)
        judged = verdict(curve, patterns, plans, short=too_short(curve), unjudged=unjudged)
    healthy = {"healthy": True, "fault": False, "not-learning": False}.get(judged.outcome)
    return Reading(
        name=run.name,
        verdict=judged.said,
        healthy=healthy,
        outcome=judged.outcome,
        findings=patterns,
        plans=plans,
        points=len(curve.raw),
        notes=notes,
        read=run.read,
    )


def _with_guard(patterns: tuple[Pattern, ...], run: Run) -> tuple[Pattern, ...]:
    """The guard's own diagnosis first: it has seen weights, targets and outputs, which curves do not show."""
    cause, _, evidence = run.verdict.partition(": ")
    told = {pattern.kind for pattern in patterns} | {incident.cause for incident in run.incidents}
    if cause in ("", "healthy", "unknown") or cause in told:
        return patterns
    kind = run.fault or cause
    step = int(run.loss.steps[0]) if len(run.loss.steps) else 0
    advice = ADVICE[Cause(cause)] if cause in set(Cause) else ""
    first = Pattern(kind=kind, severity="warn", step=step, evidence=evidence, advice=advice)
    return (first, *(pattern for pattern in patterns if pattern.kind != "not-learning"))


def _found(curve: Curve, objective: str) -> list[Pattern]:
    looks = _looks(curve, objective)
    found = [pattern for look in looks for pattern in look(curve)]
    if from_the_start in looks and not any(p.until is None and p.kind in _ENDS_HIGH for p in found):
        found[:0] = ends_above(curve)
    return found


def _looks(curve: Curve, objective: str) -> tuple[Callable[[Curve], list[Pattern]], ...]:
    """What such a curve can show."""
    if not is_enough(curve) or len(curve) < FEWEST_EPOCHS:
        return _ALWAYS
    if objective:
        return _ANY_OBJECTIVE
    if len(curve) < FEWEST_POINTS:
        return _FEW
    looks = _PATTERNS
    if is_resumed(curve):
        looks = tuple(look for look in looks if look not in _ABOUT_THE_START)
    return tuple(look for look in looks if look is not learning) if too_short(curve) else looks


def _unjudged(curve: Curve, *, resumed: bool) -> str:
    """Why nothing is said about learning; empty when the loss fell."""
    if len(curve) < FEWEST_EPOCHS:
        return ""
    seen = fell(curve)
    if seen:
        return ""
    if resumed:
        return f"the log begins at step {int(curve.raw.steps[0]):,}"
    return "its noise hides whether it fell" if seen is None else "no fall beyond its noise"


def _for_run(pattern: Pattern, run: Run, *, resumed: bool) -> Pattern:
    """Without advice that the settings of the run have made pointless, where the log contains settings."""
    if resumed and pattern.kind in ("plateau", "underfitting"):
        pattern = replace(pattern, severity="info")  # how far it has come since its start is not in the log
    training = run.settings.get("training")
    if not isinstance(training, Mapping):
        return pattern
    idle = ["if the run uses fp16"] if training.get("mixed_precision") in ("fp32", "bf16") else []
    idle += ["clip the gradient"] if training.get("max_grad_norm") else []
    kept = [clause for clause in pattern.advice.split("; ") if not clause.startswith(tuple(idle))]
    return replace(pattern, advice="; ".join(kept)) if idle else pattern


def _distinct(found: list[Pattern]) -> list[Pattern]:
    explained = set[str]().union(*(_EXPLAINS.get(pattern.kind, set()) for pattern in found if pattern.until is None))
    if any(pattern.kind == "learning-rate-too-high" and pattern.severity == "act" for pattern in found):
        explained |= _EXPLAINS["learning-rate-too-high from the start"]
    lost = {pattern.kind for pattern in found if pattern.until is None} & {"divergence", "spike-unhealed", "non-finite"}
    kept: list[Pattern] = []
    for pattern in found:
        again = pattern.kind == "divergence" and any(k.kind in lost and k.until is None for k in kept)
        twice = pattern.kind == "learning-rate-too-high" and pattern.kind in {k.kind for k in kept}
        if pattern.kind not in explained and not again and not twice:
            kept.append(pattern)
    return kept
