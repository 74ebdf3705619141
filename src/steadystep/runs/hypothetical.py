"""What a guard would have done: the logged curve goes through the real detectors, diagnosis and policy."""

import math
import re
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from steadystep.config import Config
from steadystep.detectors import (
    BadAdvantages,
    DeadGroups,
    Detector,
    EntropyCollapse,
    FlatReward,
    KlBlowUp,
    PolicyMismatch,
    RatioExplosion,
    RewardCollapse,
    RewardHacking,
    ValueDivergence,
    sees_every_step,
)
from steadystep.detectors.build import build_detectors
from steadystep.diagnosis import LASTING, explain
from steadystep.diagnosis.advice import ADVICE
from steadystep.diagnosis.causes import Cause
from steadystep.engine.judge import notice
from steadystep.engine.verdict import conclude
from steadystep.policy import Budget, Limits
from steadystep.records import Action, Counterfactual, Finding, Outcome, Signals
from steadystep.rl.vocabulary import canonical
from steadystep.runs.curve import Curve
from steadystep.runs.levels import Floats, trailing_median
from steadystep.runs.reading import Pattern, PlannedAction

_EVERY = 20  # points between remembered states
_REMEMBERED = 16
_WHOLE = 50_000  # points: a longer log is replayed around what stands out
_PRIME, _LEAD, _AFTER = 256, 512, 256  # points
_MOST = 50_000
_BLOCK = 64
_MEDIAN_OF, _SOON, _BACK = 16, 256, 0.3  # points, points, of the rise
_SCREEN = math.log(4.0)


@final
@dataclass(frozen=True, slots=True)
class _State:
    step: int
    lr: float
    second_moment: float | None = None


@final
@dataclass(frozen=True, slots=True)
class HypotheticalRun:
    """Plans in order; `whole` is False when only stretches of a long log were replayed."""

    plans: tuple[PlannedAction, ...]
    whole: bool = True


def hypothetical_run(curve: Curve) -> HypotheticalRun:
    """Every step at which a guard would have done more than look."""
    loss = curve.run.loss
    if not len(loss):
        return HypotheticalRun(())
    norm = _beside(curve.run.grad_norm.steps, curve.run.grad_norm.values, loss.steps, 1.0)
    lr = _beside(curve.run.lr.steps, curve.run.lr.values, loss.steps, 3e-4)
    if not np.any(norm > 0.0):
        norm = np.ones(len(loss))  # never measured
    stretches = _stretches(loss.values, norm, lr)
    plans: list[PlannedAction] = []
    for begin, end in stretches:
        # why the first points too: what has been lost is measured by what had been learned
        places = np.arange(end) if begin <= _PRIME else np.r_[0:_PRIME, begin:end]
        quiet = 0 if begin <= _PRIME else _PRIME + _LEAD // 2
        plans += _stretch(loss.steps[places], loss.values[places], norm[places], lr[places], quiet)
    unique = tuple(dict.fromkeys(plans))
    return HypotheticalRun(unique, whole=len(stretches) == 1 and stretches[0] == (0, len(loss)))


def _beside(
    steps: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    values: Floats,
    wanted: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    unknown: float,
) -> Floats:
    """The last value logged at or before each wanted step; a constant where there is none."""
    if not len(steps):
        return np.full(len(wanted), unknown)
    places = np.searchsorted(steps, wanted, side="right") - 1
    return np.where(places >= 0, values[np.maximum(places, 0)], values[0])


def _stretches(loss: Floats, norm: Floats, lr: Floats) -> list[tuple[int, int]]:
    """All of a log that is not too long; otherwise what lies around anything a detector might act upon."""
    count = len(loss)
    if count <= _WHOLE:
        return [(0, count)]
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(norm)
        odd = ~np.isfinite(loss) | ~np.isfinite(norm) | ~np.isfinite(lr)
        odd |= logs - trailing_median(np.nan_to_num(logs, posinf=0.0, neginf=0.0)) > _SCREEN
        odd[1:] |= lr[1:] > 5.0 * np.maximum.accumulate(np.nan_to_num(lr))[:-1]
    odd |= _risen(loss)
    marked = np.zeros(count // _BLOCK + 1, dtype=bool)
    marked[np.flatnonzero(odd) // _BLOCK] = True
    found: list[tuple[int, int]] = [(0, 4 * _LEAD)]
    for block in np.flatnonzero(marked).tolist():
        begin, end = max(0, block * _BLOCK - _LEAD), min(count, (block + 1) * _BLOCK + _AFTER)
        if begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
        if sum(b - a for a, b in found) > _MOST:
            break
    return found


def _risen(loss: Floats) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Blocks of points whose median lies above the recent best by several sigma of such medians."""
    blocks = len(loss) // _BLOCK
    clean = np.nan_to_num(loss[: blocks * _BLOCK], posinf=0.0, neginf=0.0).reshape(blocks, _BLOCK)
    levels = np.median(clean, axis=1)
    sigma = np.median(np.abs(np.diff(clean, axis=1)), axis=1) / np.sqrt(_BLOCK)
    best = np.minimum.reduce([np.concatenate([np.full(k, np.inf), levels[:-k]]) for k in range(1, 9)])
    odd = levels > best + np.maximum(8.0 * sigma, 0.02 * np.abs(levels))
    return np.append(np.repeat(odd, _BLOCK), np.zeros(len(loss) - blocks * _BLOCK, dtype=bool))


def _stretch(
    steps: "np.ndarray[tuple[int], np.dtype[np.int64]]", loss: Floats, norm: Floats, lr: Floats, quiet: int
) -> list[PlannedAction]:
    """One stretch through a guard that was made for it; what it says while it learns the level does not count."""
    made = tuple(filter(sees_every_step, build_detectors(Config())))
    budget, limits = Budget(), Limits()
    states: deque[_State] = deque([_State(-1, float(lr[0]))], maxlen=_REMEMBERED)
    plans: list[PlannedAction] = []
    for i, (x, y, z) in enumerate(zip(loss.tolist(), norm.tolist(), lr.tolist(), strict=True)):
        signals = Signals(  # a log knows of no tensors, so all of them count as one
            step=i, loss=x, grad_norm=y, norms=(y,), names=("all",), lr=z, refused_in_a_row=budget.refused_in_a_row
        )
        found = notice(made, signals)
        lasting = next((f for f in found if f.detector in LASTING and f.severity == "act"), None)
        if lasting is not None and lasting.baseline is not None:
            # why: what older weights on the same batches tell a guard, hindsight tells here
            then = lasting.value if _comes_back(loss[i:], lasting.baseline) else lasting.baseline
            signals = replace(
                signals, counterfactual=Counterfactual(step=i, old_loss=then, current_loss=lasting.value, lr=z)
            )
            found = tuple(replace(f, severity="warn") if f is lasting and then == f.value else f for f in found)
        if found:
            verdict = conclude(signals, found, budget=budget, limits=limits, states=tuple(states))
            told = explain(replace(signals, counterfactual=None), found).evidence  # nobody has tried older weights
            plan, diagnosis = verdict.plan, replace(verdict.diagnosis, evidence=told)
            refused = any(a in (Action.SKIP_STEP, Action.ROLLBACK, Action.STOP) for a in plan.actions)
            restored = plan.to if Action.ROLLBACK in plan.actions else None
            budget.count(
                Outcome(step=i, reading=x, stepped=not refused, plan=plan, diagnosis=diagnosis, restored=restored)
            )
            if plan.actions and i >= quiet:
                reason = f"{plan.reason}: {_in_steps(diagnosis.evidence, steps)}"
                plans.append(PlannedAction(int(steps[i]), "+".join(plan.actions), reason))
        elif budget.refused_in_a_row:
            budget.count(Outcome(step=i, reading=x, stepped=True))
        if i % _EVERY == 0 and budget.episode.calm(i):
            states.append(_State(i, z))
    return plans


def _comes_back(after: Floats, baseline: float) -> bool:
    """A loss that soon is back was no divergence."""
    raised = float(np.median(after[:_MEDIAN_OF]))
    parts = [
        float(np.median(after[k : k + _MEDIAN_OF])) for k in range(0, min(len(after), _SOON) - _MEDIAN_OF, _MEDIAN_OF)
    ]
    return any(part <= baseline + _BACK * (raised - baseline) for part in parts)


def _in_steps(text: str, steps: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> str:
    """Detectors were given positions; people want the steps that were logged there."""

    def logged(match: re.Match[str]) -> str:
        place = int(match[1])
        return f"step {int(steps[place])}" if place < len(steps) else match[0]

    return re.sub(r"\bstep (\d+)", logged, text)


_OF_A_POLICY: tuple[Callable[[], Detector], ...] = (
    *(PolicyMismatch, RatioExplosion, RewardHacking, ValueDivergence, KlBlowUp, EntropyCollapse),
    *(RewardCollapse, BadAdvantages, DeadGroups, FlatReward),
)


def policy_patterns(curve: Curve) -> list[Pattern]:
    """One pattern per cause, at the first step that showed it; nothing for a run that a guard has watched itself."""
    if curve.run.is_guarded:
        return []
    rows: dict[int, dict[str, float]] = defaultdict(dict)
    run = curve.run
    as_loss = [(name, run.loss) for part, name in run.columns.items() if part == "loss"]  # such as a KL loss
    for name, series in (*run.metrics.items(), *run.validation.items(), *as_loss):
        if canonical(name) is not None:
            for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
                rows[int(step)][name] = float(value)
    detectors = [make() for make in _OF_A_POLICY]
    first: dict[str, Pattern] = {}
    for step in sorted(rows):
        signals = Signals(step=step, loss=0.0, grad_norm=0.0, metrics=rows[step])
        for found in (finding for detector in detectors for finding in detector.update(signals)):
            if found.severity != "info":
                _note(first, signals, found)
    return list(first.values())


def _note(first: dict[str, Pattern], signals: Signals, found: Finding) -> None:
    cause = explain(signals, (found,)).cause
    advice = ADVICE[Cause(cause)]
    if cause not in first:
        first[cause] = Pattern(kind=cause, severity="warn", step=found.step, evidence=found.what, advice=advice)
