"""The checklist of a run: what its settings ask for, held against what its curves and its folder show."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from steadystep._utils.checklist import NOT_SAID, ChecklistItem, ItemName, asked_for, ordered_items
from steadystep._utils.text import count, number, share
from steadystep.records import GRAVE
from steadystep.runs.run import Run
from steadystep.runs.table import higher_is_better

_HELD = 200  # steps after a serious incident in which the guard may hold the learning rate down and lift it again
_ROUNDING = 1e-9
_LEAP = 3.0  # times the step before: no schedule rises like that, once it has begun
_MOSTLY = 0.5
_OFTEN = 0.1  # clipped steps: above it, clipping does the optimizer's job
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


def checklist(run: Run) -> tuple[ChecklistItem, ...]:
    """All that the log and the folder tell; `steadystep check RUN` and the report page both show this."""
    if not len(run.loss):
        return (ChecklistItem(name=ItemName.STEPS, state="absent", evidence="the log has no steps yet"),)
    return ordered_items(_items(run))


def _items(run: Run) -> Iterator[ChecklistItem]:
    asked = asked_for(run.settings)
    yield _clipping(run, asked.get(ItemName.CLIPPING))
    yield _warmup(run, asked.get(ItemName.WARMUP))
    yield _schedule(run, asked.get(ItemName.SCHEDULE))
    yield asked.get(ItemName.PRECISION) or _unknown(ItemName.PRECISION)
    yield _nan_check(run, asked.get(ItemName.NAN_CHECK))
    yield _norms(run)
    yield _checkpoints(run, asked.get(ItemName.CHECKPOINTS))
    yield _validation(run)
    yield _incidents(run)


def _unknown(name: ItemName, evidence: str = NOT_SAID) -> ChecklistItem:
    return ChecklistItem(name=name, state="unknown", evidence=evidence)


def _clipping(run: Run, asked: ChecklistItem | None) -> ChecklistItem:
    times, ours = len(run.clipped), run.source == "steadystep"
    if not times:
        if asked is None:
            return _unknown(ItemName.CLIPPING)
        reached = "; never reached" if ours and asked.state == "present" else ""
        return replace(asked, evidence=asked.evidence + reached)
    said = f"clipped {share(times, len(run.loss))} of the steps"
    found = asked or ChecklistItem(name=ItemName.CLIPPING, state="present", evidence="")
    found = replace(found, evidence=f"{found.evidence}; {said}".removeprefix("; "))
    if found.state == "present" and times > _OFTEN * len(run.loss):
        fix = "a lower learning rate or a longer warmup: most updates are clipped"
        return replace(found, state="partial", fix=fix)
    return found


def _warmup(run: Run, asked: ChecklistItem | None) -> ChecklistItem:
    if asked is not None and asked.state != "absent":
        return asked
    rates = finite_rates(run)
    if len(rates) <= 10:
        return asked or _unknown(ItemName.WARMUP)
    end = warmup_end(rates)
    if end is None:
        said, fix = f"no warmup: the first step used {number(float(rates[0]))}", "training: {warmup_steps: 0.05}"
        return ChecklistItem(name=ItemName.WARMUP, state="absent", evidence=said, fix=fix)
    at = int(run.lr.steps[np.flatnonzero(np.isfinite(run.lr.values))[end]])
    said = f"the learning rate rose from {number(float(rates[0]))} until step {at:,}"
    return ChecklistItem(name=ItemName.WARMUP, state="present", evidence=said)


def _schedule(run: Run, asked: ChecklistItem | None) -> ChecklistItem:
    if asked is not None and asked.state != "absent":
        return asked
    name, (rates, held) = ItemName.SCHEDULE, asked_rates(run)
    if len(rates) <= 10:
        return asked or _unknown(name)
    if rates[-1] < 0.9 * rates.max():
        said = f"the learning rate fell from {number(float(rates.max()))} to {number(float(rates[-1]))}"
        return ChecklistItem(name=name, state="present", evidence=said)
    if held > _MOSTLY:
        return _unknown(name, "the guard limited the learning rate most of the time")
    said = "the learning rate did not fall" + (", except when limited by the guard" if held else "")
    return ChecklistItem(name=name, state="absent", evidence=said, fix="training: {lr_scheduler: cosine}")


def _nan_check(run: Run, asked: ChecklistItem | None) -> ChecklistItem:
    name, ours = ItemName.NAN_CHECK, run.source == "steadystep"
    checked = asked or ChecklistItem(name=name, state="present", evidence="every step, before the update")
    bad = run.loss.steps[~np.isfinite(run.loss.values)]
    if not len(bad):
        said = f"all {len(run.loss):,} losses are finite"
        return replace(checked, evidence=f"{checked.evidence}; {said}") if ours else _unknown(name, said)
    refused = {incident.step for incident in run.incidents if not incident.stepped}
    losses = f"{len(bad):,} non-finite loss{'es' * (len(bad) > 1)}, the first at step {int(bad[0]):,}"
    said = f"{losses}; {count(len(refused), 'update')} skipped"
    if ours and set(map(int, bad)) <= refused:
        return replace(checked, evidence=f"{checked.evidence}; {said}")
    return ChecklistItem(name=name, state="partial", evidence=said, fix=f"steadystep diagnose {run.path}")


def _norms(run: Run) -> ChecklistItem:
    norms = run.grad_norm.values[np.isfinite(run.grad_norm.values)]
    if not len(norms):
        fix = "log the norm that clip_grad_norm_ returns, or use steadystep.Guard"
        return ChecklistItem(name=ItemName.NORMS, state="absent", evidence="not in the log", fix=fix)
    said = f"{len(norms):,} steps, median {float(np.median(norms)):.3g}, largest {float(norms.max()):.3g}"
    if run.layers is not None and len(run.layers.steps):
        said += f"; {len(run.layers.names)} tensors at an interval"
    return ChecklistItem(name=ItemName.NORMS, state="present", evidence=said)


def _checkpoints(run: Run, asked: ChecklistItem | None) -> ChecklistItem:
    """The folder decides; the settings only where there is none to look into."""
    name, folder = ItemName.CHECKPOINTS, run.path if run.path.is_dir() else run.path.parent
    kept = folder / "checkpoints"
    found = sorted(p.name for p in kept.glob("*")) if kept.is_dir() else []
    if found:
        return ChecklistItem(name=name, state="present", evidence=f"{len(found)} in the folder, the latest {found[-1]}")
    if run.source != "steadystep":
        return _unknown(name)
    if not run.path.exists():
        return asked or _unknown(name)
    fix = "monitoring: {save_checkpoints: true}"
    if asked is not None and asked.state == "present":
        return ChecklistItem(name=name, state="partial", evidence=f"{asked.evidence}; none in the folder")
    said = "none in the folder: a crash would lose the run"
    return ChecklistItem(name=name, state="absent", evidence=said, fix=fix)


def _validation(run: Run) -> ChecklistItem:
    name = ItemName.VALIDATION
    if not run.validation:
        return ChecklistItem(name=name, state="absent", evidence="none in the log", fix="guard.validate(val_loss)")
    metric = "val_loss" if "val_loss" in run.validation else next(iter(run.validation))
    series = run.validation[metric]
    if not len(series) or not np.isfinite(series.values).any():
        return ChecklistItem(name=name, state="partial", evidence="no finite value")
    finite = np.where(np.isfinite(series.values), series.values, np.nan)
    best = int(np.nanargmax(finite) if higher_is_better(metric) else np.nanargmin(finite))
    said = f"{len(series):,} times, best {series.values[best]:.4g} at step {int(series.steps[best]):,}"
    return ChecklistItem(name=name, state="present", evidence=said)


def _incidents(run: Run) -> ChecklistItem:
    name = ItemName.INCIDENTS
    serious = [i for i in run.incidents if i.severity in GRAVE]
    if not serious:
        return ChecklistItem(name=name, state="present", evidence="none that needed an intervention")
    causes = sorted({incident.cause for incident in serious})
    said, fix = f"{len(serious):,}: {', '.join(causes[:4])}", f"steadystep report {run.path}"
    return ChecklistItem(name=name, state="partial", evidence=said, fix=fix)
