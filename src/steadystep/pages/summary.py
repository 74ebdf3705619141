"""A run in one row of the list."""

import time
from dataclasses import dataclass
from typing import Literal, final

import numpy as np

from steadystep.pages.charts import is_wide, thin
from steadystep.pages.episodes import Headline, episodes, gravest, interventions
from steadystep.pages.report import last_finite
from steadystep.runs.run import Run, Series

RunStatus = Literal["running", "finished", "stopped", "stale", "idle"]
QUIET_S = 120.0  # without a new line in the log: not running any more, as far as one can see
_WIDTH, _HEIGHT = 120, 30


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Spark:
    """A curve in the size of a word."""

    path: str = ""
    marks: tuple[tuple[float, str], ...] = ()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What the list shows about a run. Where only a glance was taken so far, `known` is False."""

    key: str
    name: str
    changed: float
    known: bool = False
    ended: bool | None = None
    end: str = ""
    source: str = ""
    steps: int = 0
    loss: float | None = None
    val_loss: float | None = None
    interventions: int = 0
    incidents: int = 0
    severity: str = ""
    said: str = ""
    healthy: bool | None = None
    problem: str = ""
    """Why it cannot be read."""
    spark: Spark = Spark()

    def state(self, now: float | None = None) -> RunStatus:
        """Running, finished, stopped by error or guard, stale (silent, and it never said that it ended), or idle."""
        if self.end in ("stopped", "error"):
            return "stopped"
        if self.ended:
            return "finished"
        if (time.time() if now is None else now) - self.changed < QUIET_S:
            return "running"
        return "stale" if self.ended is False else "idle"


@np.errstate(all="ignore")
def summary(key: str, run: Run, verdict: Headline | None, changed: float) -> RunSummary:
    """From a whole reading."""
    told = episodes(run)
    last = int(run.loss.steps[-1]) if len(run.loss) else 0
    marks = tuple((round(_WIDTH * e.first / max(last, 1), 1), e.severity) for e in told if e.acted)
    return RunSummary(
        key=key,
        name=key,
        changed=changed,
        known=True,
        ended=run.ended,
        end=run.end,
        source=run.source,
        steps=last + 1 if len(run.loss) else 0,
        loss=last_finite(run.loss),
        val_loss=last_finite(run.validation.get("val_loss", Series())),
        interventions=len(interventions(run, told)),
        incidents=len(told),
        severity=gravest(run.incidents),
        said=verdict.said if verdict else "",
        healthy=verdict.healthy if verdict else None,
        spark=Spark(path=spark_path(run.loss), marks=marks[-40:]),
    )


@np.errstate(all="ignore")
def spark_path(series: Series) -> str:
    """An SVG path 120 wide and 30 high; logarithmic where the curve spans orders of magnitude."""
    curve = thin(series, buckets=60)
    values = np.log10(np.abs(curve.values)) if is_wide(series) else curve.values
    finite = np.isfinite(values)
    if not finite.any():
        return ""
    values = values / max(float(np.abs(values[finite]).max()), 1e-300)
    low, high = float(values[finite].min()), float(values[finite].max())
    x = (curve.steps - curve.steps[0]) / max(int(curve.steps[-1] - curve.steps[0]), 1) * _WIDTH
    y = _HEIGHT - 2 - (values - low) / (high - low or 1.0) * (_HEIGHT - 4)
    path, pen = [], "M"
    for at, level, ok in zip(x, y, finite, strict=True):
        if ok:
            path.append(f"{pen}{at:.1f} {level:.1f}")
        pen = "L" if ok else "M"
    return "".join(path)
