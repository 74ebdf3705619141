"""What protects a run, read from its settings and, where those are missing, from its curves."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from steadystep._utils.text import number, share
from steadystep.records import GRAVE
from steadystep.runs.run import Run

_HELD = 200  # steps after a serious incident in which the guard may hold the learning rate down and lift it again
_ROUNDING = 1e-9
_LEAP = 3.0  # times the step before: no schedule rises like that, once it has begun
_GRADUAL = 0.8  # of a warm-up's rise at most is in one step


def finite_rates(run: Run) -> NDArray[np.float64]:
    """All that were logged."""
    return run.lr.values[np.isfinite(run.lr.values)]


@np.errstate(all="ignore")
def asked_rates(run: Run) -> tuple[NDArray[np.float64], float]:
    """The curve without changes around incidents and without leaps, and the share of the changes left out."""
    known = np.isfinite(run.lr.values) & (run.lr.values > 0)
    steps, rates = run.lr.steps[known], run.lr.values[known]
    if len(rates) < 2:
        return rates, 0.0
    change = np.diff(np.log(rates))
    held = np.zeros(len(change), dtype=bool)
    for incident in run.incidents:
        if incident.severity in GRAVE or not incident.stepped:
            first, last = np.searchsorted(steps[1:], (incident.step, incident.step + _HELD))
            if np.any(np.abs(change[first:last]) > _ROUNDING):  # a refused update alone leaves the rate as it is
                held[first:last] = True
    leapt = False
    for at in np.flatnonzero(~held & (np.abs(change) > np.log(_LEAP))):
        if change[at] > 0 and at > 0:
            held[at] = leapt = True
        elif change[at] < 0 and leapt:
            held[at], leapt = True, False
    change[held] = 0.0
    return rates[0] * np.exp(np.concatenate(([0.0], np.cumsum(change)))), float(held.mean())


def warmup_end(rates: NDArray[np.float64]) -> int | None:
    """Where the rise at the beginning ends; None when there is none, or when it is one leap."""
    rises = np.diff(rates)
    leaps = np.flatnonzero(rates[2:] > _LEAP * np.maximum(rates[1:-1], 1e-300)) + 2
    falls = np.flatnonzero(rises < -1e-6 * np.abs(rates[:-1])) + 1
    end = min(len(rates), *(int(at[0]) for at in (leaps, falls) if len(at)), len(rates))
    top = int(np.argmax(rates[:end]))
    rise = rates[top] - rates[0]
    if top < 2 or rates[0] >= 0.5 * rates[top] or rises[:top].max() > _GRADUAL * rise:
        return None
    return top


Mark = Literal["yes", "no", "unknown", "needless"]
_MOSTLY = 0.5


@final
@dataclass(frozen=True, slots=True)
class ChecklistItem:
    """One protection, and how one knows."""

    name: str
    mark: Mark
    evidence: str


def checklist(run: Run) -> tuple[ChecklistItem, ...]:
    """Seven things worth having, in the order in which they save runs."""
    training, monitoring = _section(run, "training"), _section(run, "monitoring")
    return (
        _clipping(run, training),
        _warmup(run, training),
        _schedule(run, training),
        _precision(training),
        _finite(run),
        _norms(run),
        _checkpoints(monitoring),
    )


def _section(run: Run, name: str) -> Mapping[str, Any]:
    found = run.settings.get(name, {})
    return found if isinstance(found, Mapping) else {}


def _finite(run: Run) -> ChecklistItem:
    if run.source != "steadystep":
        return ChecklistItem("NaN check", "unknown", "")
    if run.settings.get("mode") == "observe":
        return ChecklistItem("NaN check", "no", "seen and logged, but not held back (observe mode)")
    return ChecklistItem("NaN check", "yes", "every step, before the update")


def _clipping(run: Run, training: Mapping[str, Any]) -> ChecklistItem:
    times = f"; clipped {share(len(run.clipped), len(run.loss))} of the steps" if len(run.clipped) else ""
    limits = {key: training.get(key) for key in ("max_grad_norm", "max_grad_value", "clip_rule")}
    said = ", ".join(f"{key} = {value}" for key, value in limits.items() if value is not None)
    if training.get("gradient_clipping") is False:
        return ChecklistItem("Gradient clipping", "no", "switched off; only outliers are held back")
    if said or training.get("gradient_clipping"):
        return ChecklistItem("Gradient clipping", "yes", (said or "max_grad_norm = 1.0") + times)
    if training:
        said = (
            "no fixed limit" if run.settings.get("mode") == "observe" else "no fixed limit; only outliers are held back"
        )
        return ChecklistItem("Gradient clipping", "no", said + times)
    if len(run.clipped):
        return ChecklistItem("Gradient clipping", "yes", times.removeprefix("; "))
    return ChecklistItem("Gradient clipping", "unknown", "")


def _warmup(run: Run, training: Mapping[str, Any]) -> ChecklistItem:
    asked = training.get("warmup_steps")
    if asked:
        return ChecklistItem("Warm-up", "yes", f"warmup_steps = {asked}")
    rates = finite_rates(run)
    end = warmup_end(rates) if len(rates) > 10 else None
    if end is not None:
        at = int(run.lr.steps[np.flatnonzero(np.isfinite(run.lr.values))[end]])
        return ChecklistItem(
            "Warm-up", "yes", f"the learning rate rose from {number(float(rates[0]))} until step {at:,}"
        )
    if len(rates) > 10:
        return ChecklistItem("Warm-up", "no", f"the first step was taken at {number(float(rates[0]))}")
    return ChecklistItem("Warm-up", "no" if training else "unknown", "")


def _schedule(run: Run, training: Mapping[str, Any]) -> ChecklistItem:
    name = training.get("lr_scheduler")
    if name:
        return ChecklistItem("Schedule", "yes", f"lr_scheduler = {name}")
    rates, held = asked_rates(run)
    if len(rates) > 10 and rates[-1] < 0.9 * rates.max():
        ends = f"{number(float(rates.max()))} to {number(float(rates[-1]))}"
        return ChecklistItem("Schedule", "yes", f"the learning rate fell from {ends}")
    if len(rates) > 10 and held > _MOSTLY:
        return ChecklistItem("Schedule", "unknown", "the guard was at the learning rate most of the time")
    if len(rates) > 10:
        return ChecklistItem(
            "Schedule", "no", "the learning rate did not fall" + (", except by the guard" if held else "")
        )
    return ChecklistItem("Schedule", "no" if training else "unknown", "")


def _precision(training: Mapping[str, Any]) -> ChecklistItem:
    name = training.get("mixed_precision")
    known: dict[str, ChecklistItem] = {
        "fp16": ChecklistItem("Mixed precision with scaler", "yes", "fp16 with a loss scaler"),
        "bf16": ChecklistItem("Mixed precision with scaler", "yes", "bf16, which needs no scaler"),
        "fp32": ChecklistItem("Mixed precision with scaler", "needless", "fp32 throughout"),
    }
    return known.get(str(name), ChecklistItem("Mixed precision with scaler", "unknown", ""))


def _norms(run: Run) -> ChecklistItem:
    if run.layers is not None and len(run.layers.steps):
        return ChecklistItem("Norm monitoring", "yes", f"every step, and {len(run.layers.names)} tensors at a cadence")
    return ChecklistItem(
        "Norm monitoring", "yes" if len(run.grad_norm) else "no", f"{len(run.grad_norm):,} norms in the log"
    )


def _checkpoints(monitoring: Mapping[str, Any]) -> ChecklistItem:
    on = monitoring.get("save_checkpoints")
    if on:
        every = monitoring.get("checkpoint_frequency")
        return ChecklistItem("Checkpoints", "yes", f"checkpoint_frequency = {every}" if every else "on")
    if monitoring:
        return ChecklistItem("Checkpoints", "no", "a crash of the machine would lose the run")
    return ChecklistItem("Checkpoints", "unknown", "")
