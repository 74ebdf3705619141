"""From a run to a reading: every pattern is looked for, the gravest is named first."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from steadystep.diagnosis.advice import advise
from steadystep.diagnosis.causes import Cause, Fault
from steadystep.records import Incident, severity_rank
from steadystep.runs.curve import Curve
from steadystep.runs.drift import drift, held_out, oscillation
from steadystep.runs.hypothetical import hypothetical_run, policy_patterns
from steadystep.runs.norms import non_finite, norms
from steadystep.runs.plateau import learning, perfection, plateau
from steadystep.runs.reading import (
    FEWEST_EPOCHS,
    FEWEST_POINTS,
    Mark,
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
    policy_patterns,
    restarts,
)
_ALWAYS = (non_finite, policy_patterns, restarts)
_FEW = (non_finite, perfection, from_the_start, held_out, policy_patterns, restarts)
_ANY_OBJECTIVE = (non_finite, norms, policy_patterns, restarts)
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
        guard: also report what a guard would have done at each step, where none was there; False is quicker for a
            long log.
    """
    curve = Curve.of(run)
    objective = unjudged_objective(run) or ("a loss of both signs" if curve.signed else "")
    with np.errstate(all="ignore"):  # huge numbers are somebody's log too
        found = _found(curve, objective)
        plans: tuple[PlannedAction, ...] = ()
        notes = run.notes
        if guard and len(curve.raw) >= FEWEST_POINTS and not run.is_guarded:
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
    kind = run.fault or cause
    if cause in ("", "healthy", "unknown"):
        return patterns
    same = [each for each in patterns if each.kind in (kind, cause)]
    if same:  # the curves show it too: with their numbers, but first
        return (*same, *(each for each in patterns if each not in same))
    steps = [each.step for each in run.incidents if each.cause == cause] or run.loss.steps.tolist() or [0]
    fault = run.fault if run.fault in set(Fault) else ""  # why: a log may come from another version
    advice = advise(Cause(cause), fault=fault) if cause in set(Cause) else ""
    first = Pattern(kind=kind, severity="warn", step=steps[0], evidence=evidence, advice=advice)
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


_HEALING_STEPS = 20  # for a spike


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The verdict on a run in one sentence, and the findings it rests on; the same in every view."""

    said: str
    healthy: bool | None
    """None: nothing is wrong, and the log cannot show whether the run learns."""
    signs: tuple[Mark, ...] = ()
    cause: str = ""
    """The likeliest cause: of the guard's diagnosis, else the first finding; empty for a healthy run."""


def headline(run: Run, reading: Reading | None = None) -> Headline:
    """Return the verdict on a run: the diagnosis of its curves, and what the guard did.

    Args:
        run: the run.
        reading: the diagnosis of its curves. Default: `diagnose(run)`.
    """
    reading = reading or diagnose(run)
    acted = run.interventions()
    cause = run.verdict.partition(": ")[0]
    known = "" if cause in ("healthy", "unknown") else cause
    marks = tuple(
        Mark(kind=p.kind, severity=p.severity, step=p.step, until=p.until, evidence=p.evidence, advice=p.advice)
        for p in reading.findings
    )
    if not acted:
        first = known or next((mark.kind for mark in marks if mark.severity != "info"), "")
        return Headline(said=reading.verdict, healthy=reading.healthy, signs=marks, cause=first)
    stuck = known == Cause.LEARNING_RATE_TOO_HIGH and _ends_where_it_began(run)
    told = () if stuck or known not in {_gravest(episode).cause for episode in acted} else (known, run.fault)
    own = [mark for mark in marks if mark.kind in told]  # told with the intervention, which helped
    signs = tuple(mark for mark in marks if mark not in own)
    handled = [_is_handled(sign, acted, run) for sign in signs]
    did = f"the guard intervened {'once' if len(acted) == 1 else f'{len(acted)} times'} ({_named(acted, known)})"
    if all(done for sign, done in zip(signs, handled, strict=True) if sign.severity != "info"):
        said, healthy = f"Recovered: {did}; the curves show no other instability.", True
    else:
        said, healthy = f"{reading.verdict} {did[0].upper()}{did[1:]}.", False
        signs, handled = marks, [_is_handled(sign, acted, run) for sign in marks]
    signs = tuple(_settled(sign) if done else sign for sign, done in zip(signs, handled, strict=True))
    return Headline(said=said, healthy=healthy, signs=signs, cause=known or _gravest(acted[0]).cause)


def _ends_where_it_began(run: Run) -> bool:
    """Whether the loss has fallen by less than 5 % since the first step: no recovery from a rate that was too high."""
    curve = Curve.of(run)
    return len(curve) > 0 and not is_resumed(curve) and curve.late > 0.95 * float(curve.values[0])


def _gravest(episode: Sequence[Incident]) -> Incident:
    return max(episode, key=lambda i: (i.restored is not None, severity_rank(i.severity)))  # the first of equals


def _settled(sign: Mark) -> Mark:
    return replace(sign, evidence=f"{sign.evidence}; handled by the guard, see the incidents", advice="")


def _is_handled(sign: Mark, acted: Sequence[Sequence[Incident]], run: Run) -> bool:
    """Trouble that began where the guard stepped in, and ended soon after; NaN losses, each of which it refused."""
    if sign.kind == "non-finite":
        bad = run.loss.steps[~np.isfinite(run.loss.values)].tolist()
        return all(any(e[0].step <= step <= e[-1].step for e in acted) for step in bad)
    return sign.until is not None and any(
        e[0].step - _HEALING_STEPS <= sign.step and sign.until <= e[-1].step + _HEALING_STEPS for e in acted
    )


def _named(acted: Sequence[Sequence[Incident]], first: str) -> str:
    """The first three, those of the likeliest cause before others."""
    told = sorted(acted, key=lambda episode: _gravest(episode).cause != first)[:3]
    named = [f"{_gravest(episode).cause} at step {episode[0].step:,}" for episode in told]
    return ", ".join(named) + (f" and {len(acted) - 3} more" if len(acted) > 3 else "")


REPLAY = "steadystep replay {} --factory package.module:make"


def incident_rows(run: Run) -> tuple[dict[str, Any], ...]:
    """Return the incidents of a run for a program: one row per cause and response, with the steps it happened at.

    Routine incidents are left out. `intervention` tells whether the guard changed something.
    """
    acted = set(run.interventions())
    rows: dict[tuple[object, ...], dict[str, Any]] = {}
    for episode in run.episodes():
        head = _gravest(episode)
        if head.is_routine:
            continue
        what = (head.cause, head.severity, head.stepped, head.restored is not None, head.origin, episode in acted)
        bundle = next((incident.bundle for incident in episode if incident.bundle), "")
        row = rows.setdefault(
            what,
            {
                "cause": head.cause,
                "severity": head.severity,
                "intervention": episode in acted,
                "count": 0,
                "steps": [],
                "evidence": head.evidence,
                "done": head.done,
                "origin": head.origin,
                "advice": head.advice,
                "bundle": bundle,
                "replay": REPLAY.format(shlex.quote(bundle)) if bundle else "",
            },
        )
        row["count"] += 1
        row["steps"].append([episode[0].step, episode[-1].step])
    return tuple(rows.values())
