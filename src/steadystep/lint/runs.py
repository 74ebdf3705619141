"""Checks a run by its log: what really happened, not what was asked for."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from steadystep.lint.report import Item, Report, State
from steadystep.runs.checklist import Mark, checklist
from steadystep.runs.roles import higher_is_better
from steadystep.runs.run import Run, Series
from steadystep.runs.run_log import read

_STATES: dict[Mark, State] = {"yes": "present", "no": "absent", "unknown": "partial", "needless": "not-needed"}
_OFTEN = 0.1  # clipped steps: above it, clipping does the optimizer's job


def check_run(path: Path) -> Report:
    """The checklist from the log and the folder.

    Raises:
        ConfigError: there is no run log.
    """
    run = read(path)
    return Report(path=str(path), kind="run", items=tuple(_items(run)), notes=run.notes)


def _items(run: Run) -> Iterator[Item]:
    if not len(run.loss):
        yield Item(name="steps", state="absent", evidence="the log holds no step yet")
        return
    yield _clipping(run)
    yield _as_reported(run, "Warm-up", "warm-up", "training: {warmup_steps: 0.05}")
    yield _as_reported(run, "Schedule", "learning-rate schedule", "training: {lr_scheduler: cosine}")
    yield _precision(run)
    yield _finite(run)
    yield _norms(run)
    yield _checkpoints(run)
    yield _validation(run)
    yield _incidents(run)


def _clipping(run: Run) -> Item:
    name, share = "gradient clipping", len(run.clipped) / len(run.loss)
    limit = _setting(run, "max_grad_norm")
    if not len(run.clipped):
        if limit is None:
            fix = "training: {max_grad_norm: 1.0}"
            return Item(name=name, state="partial", evidence="no step was clipped and no limit is known", fix=fix)
        return Item(name=name, state="present", evidence=f"limit {limit}, never reached")
    evidence = f"{len(run.clipped):,} of {len(run.loss):,} steps clipped ({share:.0%})"
    if share > _OFTEN:
        fix = "a lower learning rate or a longer warm-up: clipping is doing the optimizer's job"
        return Item(name=name, state="partial", evidence=evidence, fix=fix)
    return Item(name=name, state="present", evidence=evidence)


def _as_reported(run: Run, reported: str, name: str, fix: str) -> Item:
    """What the report says of it, so that the two cannot contradict each other."""
    found = next(item for item in checklist(run) if item.name == reported)
    state, evidence = _STATES[found.mark], found.evidence or "the log does not say"
    return Item(name=name, state=state, evidence=evidence, fix=fix if found.mark == "no" else "")


def _precision(run: Run) -> Item:
    kind = _setting(run, "mixed_precision")
    if kind is None:
        return Item(name="mixed precision", state="not-needed", evidence="the log does not say")
    if kind == "fp32":
        fix = "training: {mixed_precision: bf16}"
        return Item(name="mixed precision", state="absent", evidence="fp32 throughout", fix=fix)
    return Item(name="mixed precision", state="present", evidence=str(kind))


def _finite(run: Run) -> Item:
    bad = run.loss.steps[~np.isfinite(run.loss.values)]
    if not len(bad):
        return Item(name="NaN check", state="present", evidence=f"all {len(run.loss):,} losses are finite")
    refused = sum(1 for incident in run.incidents if not incident.stepped)
    evidence = f"{len(bad):,} losses are not finite, the first at step {int(bad[0]):,}; {refused:,} updates refused"
    fix = f"steadystep diagnose {run.path}"
    return Item(name="NaN check", state="partial", evidence=evidence, fix=fix)


def _norms(run: Run) -> Item:
    norms = _finite_values(run.grad_norm)
    if not len(norms):
        fix = "log the norm that clip_grad_norm_ returns, or use steadystep.Guard"
        return Item(name="gradient norm watched", state="absent", evidence="not in the log", fix=fix)
    evidence = f"{len(norms):,} steps, median {float(np.median(norms)):.3g}, largest {float(norms.max()):.3g}"
    return Item(name="gradient norm watched", state="present", evidence=evidence)


def _checkpoints(run: Run) -> Item:
    folder = run.path if run.path.is_dir() else run.path.parent
    found = sorted(p.name for p in (folder / "checkpoints").glob("*")) if (folder / "checkpoints").is_dir() else []
    if not found:
        fix = "monitoring: {save_checkpoints: true}"
        return Item(name="checkpoints", state="absent", evidence="none in the folder", fix=fix)
    return Item(name="checkpoints", state="present", evidence=f"{len(found)} in the folder, the last {found[-1]}")


def _validation(run: Run) -> Item:
    if not run.validation:
        fix = "guard.validate(val_loss)"
        return Item(name="validation", state="absent", evidence="none in the log", fix=fix)
    name = "val_loss" if "val_loss" in run.validation else next(iter(run.validation))
    series = run.validation[name]
    if not len(series) or not np.isfinite(series.values).any():
        return Item(name="validation", state="partial", evidence="no finite value")
    finite = np.where(np.isfinite(series.values), series.values, np.nan)
    best = int(np.nanargmax(finite) if higher_is_better(name) else np.nanargmin(finite))
    evidence = f"{len(series):,} times, best {series.values[best]:.4g} at step {int(series.steps[best]):,}"
    return Item(name="validation", state="present", evidence=evidence)


def _incidents(run: Run) -> Item:
    serious = [i for i in run.incidents if i.severity in ("act", "critical")]
    if not serious:
        return Item(name="incidents", state="present", evidence="none that called for an action")
    causes = sorted({incident.cause for incident in serious})
    evidence = f"{len(serious):,}: {', '.join(causes[:4])}"
    return Item(name="incidents", state="partial", evidence=evidence, fix=f"steadystep report {run.path}")


def _setting(run: Run, key: str) -> object:
    section = run.settings.get("training")
    return section.get(key) if isinstance(section, dict) else None


def _finite_values(series: Series) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    return series.values[np.isfinite(series.values)]
