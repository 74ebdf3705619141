"""Which run is better, by how much, and whether that is more than noise."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from steadystep._utils.numbers import with_words
from steadystep._utils.text import NOTHING, dotted, number
from steadystep.errors import ConfigError
from steadystep.runs.run import Run, Series
from steadystep.stats import SIGMA_PER_MAD

_BLOCKS = 8


@final
@dataclass(frozen=True, slots=True)
class CurveLevel:
    """The value at the end of a curve, and the standard error that its own noise gives it."""

    value: float
    noise: float | None
    """None with too few points to tell."""
    points: int


@np.errstate(all="ignore")  # why: a log may hold any number, and the square of it may be none
def curve_level(series: Series, *, until: int | None = None) -> CurveLevel | None:
    """Over the last tenth of a long curve, or the last three points of a short one; None for an empty one.

    Args:
        series: the curve.
        until: steps after this one do not count.
    """
    stop = len(series) if until is None else int(np.searchsorted(series.steps, until, side="right"))
    part = Series(series.steps[:stop], series.values[:stop])
    value, values = part.level, part.values
    if value is None:
        return None
    finite = part.tail[np.isfinite(part.tail)]
    if math.isnan(value):
        return CurveLevel(math.nan, None, len(values))
    if len(finite) >= 5 * _BLOCKS:
        return CurveLevel(value, _noise_of_blocks(finite), len(values))
    return CurveLevel(value, _noise_of_turns(values[np.isfinite(values)], len(finite)), len(values))


def _noise_of_blocks(values: NDArray[np.float64]) -> float:
    """Means of blocks, so that neighbours may be alike; around a straight line, because a run still learns."""
    size = len(values) // _BLOCKS
    means = np.median(values[len(values) - size * _BLOCKS :].reshape(_BLOCKS, size), axis=1)
    at = np.arange(_BLOCKS) - (_BLOCKS - 1) / 2
    rest = means - means.mean() - at * (at @ means) / (at @ at)
    return float(np.sqrt(np.sum(rest**2) / (_BLOCKS - 2) / _BLOCKS))


def _noise_of_turns(values: NDArray[np.float64], used: int) -> float | None:
    """Second differences leave a smooth course out, and have six times the variance of what is left."""
    # why not `levels.bend_noise`: it divides by 0.6745 where this multiplies by 1.4826, and the last digits differ
    turns = np.diff(values[-20:], n=2)
    if len(turns) < 3:
        return None
    return float(SIGMA_PER_MAD * np.median(np.abs(turns)) / math.sqrt(6) / math.sqrt(used))


def differing(settings: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Each setting that is not the same everywhere: its name, and its value in every run.

    A run whose log contains no settings at all differs in none.

    >>> differing([{"training": {"lr": 1e-3, "seed": 1}}, {"training": {"lr": 3e-3, "seed": 1}}])
    (('training.lr', ('0.001', '0.003')),)
    """
    flat = [{k: NOTHING if v is None else str(v) for k, v in dotted(one)} for one in settings]
    names = dict.fromkeys(name for one in flat for name in one)
    differ = [name for name in names if len({one.get(name, NOTHING) for one in flat if one}) > 1]
    return tuple((name, tuple(one.get(name, NOTHING) for one in flat)) for name in differ)


_CLEAR = 2.0  # standard errors of the difference
_SAME_LENGTH = 0.02


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One run among others."""

    name: str
    steps: int
    score: float | None
    """What is compared; NaN for a run that diverged."""
    noise: float | None
    """The standard error of the score."""
    loss: float | None
    val_loss: float | None
    best_val_loss: float | None
    incidents: int
    interventions: int
    refused: int
    rollbacks: int
    effective_share: float | None
    """Part of the work that is in the final weights; None where these are lost."""
    seconds_lost: float | None
    """What its incidents cost."""
    grad_norm: float | None
    peak_lr: float | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Several runs, in the order they were given, and which one is better."""

    judged_by: Literal["held-out loss", "training loss"]
    """The loss that they are compared by."""
    at: int
    """Step up to which they are compared: the end of the shortest."""
    runs: tuple[Standing, ...]
    """One entry per run."""
    better: str | None
    """Name of the best run, if its lead exceeds the noise."""
    said: str
    """The result as a sentence."""
    settings: tuple[tuple[str, tuple[str, ...]], ...]
    """Settings in which they differ: key, and one value per run."""

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON: non-finite numbers as text, settings by run."""
        told = asdict(self)
        told["runs"] = with_words(told["runs"])
        names = [one.name for one in self.runs]
        told["settings"] = {key: dict(zip(names, values, strict=True)) for key, values in self.settings}
        return told


@np.errstate(all="ignore")
def compare(runs: Sequence[Run]) -> Comparison:
    """Compare `runs` by validation loss if all have it, else by training loss, over the end of their common steps."""
    if len(runs) < 2:
        raise ConfigError("compare needs at least two runs")
    held_out = all("val_loss" in run.validation and len(run.validation["val_loss"]) for run in runs)
    at, cut, scores = _scores(runs, [run.validation["val_loss"] if held_out else run.loss for run in runs])
    if held_out and None in scores:  # one was first validated after another had ended: there is nothing to compare
        held_out, (at, cut, scores) = False, _scores(runs, [run.loss for run in runs])
    names = labels(runs)
    kind: Literal["held-out loss", "training loss"] = "held-out loss" if held_out else "training loss"
    lost = [name for name, run in zip(names, runs, strict=True) if _is_lost(run)]
    better, said = _verdict(names, scores, kind, at, lost, shortened=cut is not None)
    return Comparison(
        judged_by=kind,
        at=at,
        runs=tuple(_standing(*three) for three in zip(names, runs, scores, strict=True)),
        better=better,
        said=said,
        settings=differing([{**run.hparams, **run.settings} for run in runs]),
    )


def labels(runs: Sequence[Run]) -> tuple[str, ...]:
    """Names, or paths where names are not enough, or paths with a number where those are not."""
    for names in ([run.name for run in runs], [str(run.path) for run in runs]):
        if len(set(names)) == len(names):
            return tuple(names)
    return tuple(f"{run.path} ({i})" for i, run in enumerate(runs, 1))


def _is_lost(run: Run) -> bool:
    """Its loss ended in NaN or infinity: whatever it reached before, it is not ahead."""
    return run.final_loss is not None and math.isnan(run.final_loss)


def _scores(runs: Sequence[Run], judged: Sequence[Series]) -> tuple[int, int | None, list[CurveLevel | None]]:
    """Up to which step they are compared, that step if it cuts one short, and the level of each there."""
    both = list(zip(runs, judged, strict=True))
    ends = [int(series.steps[-1]) for run, series in both if len(series) and not _is_lost(run)]
    ends = ends or [int(series.steps[-1]) for series in judged if len(series)]
    if not ends:
        raise ConfigError("none of these runs has a loss to compare")
    at, longest = min(ends), max(ends)
    cut = at if at < (1 - _SAME_LENGTH) * longest else None
    lost = [CurveLevel(math.nan, None, len(series)) if _is_lost(run) else None for run, series in both]
    return at, cut, [gone or curve_level(series, until=cut) for gone, series in zip(lost, judged, strict=True)]


def _verdict(
    names: Sequence[str],
    scores: Sequence[CurveLevel | None],
    kind: str,
    at: int,
    lost: Sequence[str],
    *,
    shortened: bool,
) -> tuple[str | None, str]:
    alive = [(s.value, s.noise, n) for n, s in zip(names, scores, strict=True) if s and math.isfinite(s.value)]
    bad = [n for n, s in zip(names, scores, strict=True) if n not in lost and s and not math.isfinite(s.value)]
    empty = [n for n, s in zip(names, scores, strict=True) if s is None]
    gone = f" {_list(lost)} ended without a finite training loss." if lost else ""
    ended = f"had no finite {kind} at step {at:,}" if shortened else f"ended without a finite {kind}"
    gone += f" {_list(bad)} {ended}." if bad else ""
    gone += f" {_list(empty)} logged none." if empty else ""
    when = f" up to step {at:,}, the end of the shortest run" if shortened else ""
    if not alive:
        return None, f"No run has a finite {kind} to compare.{gone}"
    (best, noise, name), *others = sorted(alive, key=lambda one: one[0])
    if not others:
        return name, f"{name} is the only run with a finite {kind}{when}.{gone}"
    second, other_noise, other = others[0]
    if number(second) == number(best):  # why not the numbers themselves: "2.119 vs 2.119" is no lead
        return None, f"No difference{when}: {name} and {other} have the same {kind}, {number(best)}.{gone}"
    lead = f"{kind} {number(best)} vs {number(second)} for {other}"
    if noise is None or other_noise is None:
        return None, f"{name} is ahead{when}: {lead}; too few points to estimate the noise.{gone}"
    spread = math.hypot(noise, other_noise)
    if second - best <= _CLEAR * spread:
        between = f"{name} and {other} differ by {number(second - best)}"
        return (
            None,
            f"No clear difference{when}: {between} in {kind}, within the noise of ±{number(_CLEAR * spread)}.{gone}",
        )
    part = f"{100 * (second - best) / abs(second):.2g} % lower" if second else "lower"
    return name, f"{name} is better{when}: {lead}, {part}; the noise is ±{number(_CLEAR * spread)}.{gone}"


def _standing(name: str, run: Run, score: CurveLevel | None) -> Standing:
    norms = run.grad_norm.values[np.isfinite(run.grad_norm.values)]
    rates = run.lr.values[np.isfinite(run.lr.values)]
    effective = run.effective()
    return Standing(
        name=name,
        steps=run.steps,
        score=score.value if score else None,
        noise=score.noise if score else None,
        loss=run.final_loss,
        val_loss=run.last_validation,
        best_val_loss=run.best_validation,
        incidents=run.num_incidents,
        interventions=run.num_interventions,
        refused=run.num_skipped,
        rollbacks=run.num_rollbacks,
        effective_share=effective.share if run.source == "steadystep" and not _is_lost(run) else None,
        seconds_lost=effective.seconds_lost if run.source == "steadystep" else None,
        grad_norm=float(np.median(norms)) if len(norms) else None,
        peak_lr=float(rates.max()) if len(rates) else None,
    )


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
