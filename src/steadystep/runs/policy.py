"""What the metrics of a policy show: the detectors of a live run, shown a log of TRL, verl, NeMo-RL or any other."""

from collections import defaultdict
from collections.abc import Callable

from steadystep.detectors import (
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
)
from steadystep.diagnosis.advice import ADVICE
from steadystep.diagnosis.causes import Cause
from steadystep.diagnosis.explain import explain
from steadystep.records import Finding, Signals
from steadystep.rl.vocabulary import canonical
from steadystep.runs.curve import Curve
from steadystep.runs.reading import Pattern

_DETECTORS: tuple[Callable[[], Detector], ...] = (
    *(PolicyMismatch, RatioExplosion, RewardHacking, ValueDivergence, KlBlowUp, EntropyCollapse),
    *(RewardCollapse, DeadGroups, FlatReward),
)


def policy(curve: Curve) -> list[Pattern]:
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
    detectors = [make() for make in _DETECTORS]
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
