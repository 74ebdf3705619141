"""What protects a run, read from its settings and, where those are missing, from its curves."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np

from steadystep.report.asked_rate import asked_rates, finite_rates, warmup_end
from steadystep.report.words import number, share
from steadystep.track.run import Run

Mark = Literal["yes", "no", "unknown", "needless"]
_MOSTLY = 0.5


@final
@dataclass(frozen=True, slots=True)
class Item:
    """One protection, and how one knows."""

    name: str
    mark: Mark
    evidence: str


def checklist(run: Run) -> tuple[Item, ...]:
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


def _finite(run: Run) -> Item:
    if run.source != "steadystep":
        return Item("NaN check", "unknown", "")
    if run.settings.get("mode") == "observe":
        return Item("NaN check", "no", "seen and logged, but not held back (observe mode)")
    return Item("NaN check", "yes", "every step, before the update")


def _clipping(run: Run, training: Mapping[str, Any]) -> Item:
    times = f"; clipped {share(len(run.clipped), len(run.loss))} of the steps" if len(run.clipped) else ""
    limits = {key: training.get(key) for key in ("max_grad_norm", "max_grad_value", "clip_rule")}
    said = ", ".join(f"{key} = {value}" for key, value in limits.items() if value is not None)
    if training.get("gradient_clipping") is False:
        return Item("Gradient clipping", "no", "switched off; only outliers are held back")
    if said or training.get("gradient_clipping"):
        return Item("Gradient clipping", "yes", (said or "max_grad_norm = 1.0") + times)
    if training:
        said = (
            "no fixed limit" if run.settings.get("mode") == "observe" else "no fixed limit; only outliers are held back"
        )
        return Item("Gradient clipping", "no", said + times)
    if len(run.clipped):
        return Item("Gradient clipping", "yes", times.removeprefix("; "))
    return Item("Gradient clipping", "unknown", "")


def _warmup(run: Run, training: Mapping[str, Any]) -> Item:
    asked = training.get("warmup_steps")
    if asked:
        return Item("Warm-up", "yes", f"warmup_steps = {asked}")
    rates = finite_rates(run)
    end = warmup_end(rates) if len(rates) > 10 else None
    if end is not None:
        at = int(run.lr.steps[np.flatnonzero(np.isfinite(run.lr.values))[end]])
        return Item("Warm-up", "yes", f"the learning rate rose from {number(float(rates[0]))} until step {at:,}")
    if len(rates) > 10:
        return Item("Warm-up", "no", f"the first step was taken at {number(float(rates[0]))}")
    return Item("Warm-up", "no" if training else "unknown", "")


def _schedule(run: Run, training: Mapping[str, Any]) -> Item:
    name = training.get("lr_scheduler")
    if name:
        return Item("Schedule", "yes", f"lr_scheduler = {name}")
    rates, held = asked_rates(run)
    if len(rates) > 10 and rates[-1] < 0.9 * rates.max():
        ends = f"{number(float(rates.max()))} to {number(float(rates[-1]))}"
        return Item("Schedule", "yes", f"the learning rate fell from {ends}")
    if len(rates) > 10 and held > _MOSTLY:
        return Item("Schedule", "unknown", "the guard was at the learning rate most of the time")
    if len(rates) > 10:
        return Item("Schedule", "no", "the learning rate did not fall" + (", except by the guard" if held else ""))
    return Item("Schedule", "no" if training else "unknown", "")


def _precision(training: Mapping[str, Any]) -> Item:
    name = training.get("mixed_precision")
    known: dict[str, Item] = {
        "fp16": Item("Mixed precision with scaler", "yes", "fp16 with a loss scaler"),
        "bf16": Item("Mixed precision with scaler", "yes", "bf16, which needs no scaler"),
        "fp32": Item("Mixed precision with scaler", "needless", "fp32 throughout"),
    }
    return known.get(str(name), Item("Mixed precision with scaler", "unknown", ""))


def _norms(run: Run) -> Item:
    if run.layers is not None and len(run.layers.steps):
        return Item("Norm monitoring", "yes", f"every step, and {len(run.layers.names)} tensors at a cadence")
    return Item("Norm monitoring", "yes" if len(run.grad_norm) else "no", f"{len(run.grad_norm):,} norms in the log")


def _checkpoints(monitoring: Mapping[str, Any]) -> Item:
    on = monitoring.get("save_checkpoints")
    if on:
        every = monitoring.get("checkpoint_frequency")
        return Item("Checkpoints", "yes", f"checkpoint_frequency = {every}" if every else "on")
    if monitoring:
        return Item("Checkpoints", "no", "a crash of the machine would lose the run")
    return Item("Checkpoints", "unknown", "")
