"""The job as it is beside the same job with one thing repaired: evidence even against a run that has learned something.

Both are trained for the same number of updates, from the same newly drawn weights and with the same batches. What
counts is which share of the gain of the repaired job the job itself misses: a number without units, whatever the loss.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, final

from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep.diagnosis.causes import Cause, Fault
from steadystep.examination.observation import Observation
from steadystep.examination.parameters import restart
from steadystep.examination.passes import Pass
from steadystep.examination.repairs import Repair, faster, repairs, slower
from steadystep.examination.workbench import Trial, Variation, Workbench, paired_standard_error
from steadystep.records import Diagnosis

COMPARED = "it learns far less than it could"
ROOM = 0.3
"""Of the loss of a constant prediction: a job below has little left to gain."""
_MISSED, _MISSED_TERM = 0.4, 0.6  # of the gain of the repaired job
_ERRORS = 3.0
_NEARLY = 0.7  # of the best gain: then a more particular repair comes first
_SMALL_BATCH = 8
_LONGER = 5
_TRAINED = 50  # updates after which the present loss counts
_SURELY = 0.6  # of what the first draw showed
_LIKELY = 2.0  # standard errors
_PATIENCE = 10  # times the updates so far, within which a job that is merely slow arrives


class RunTrial(Protocol):
    """Makes a trial and keeps it for the report."""

    def __call__(self, name: str, what: str, variation: Variation, *, num_steps: int | None = None) -> Trial:
        """See `Workbench.trial`."""


@final
@dataclass(frozen=True, slots=True)
class Compared:
    """One repair that was tried beside the job as it is."""

    repair: Repair
    trial: Trial
    missed: float
    """The share of its gain that the job misses."""
    gain: float
    """The share of the loss of a constant prediction that is gone."""


def missed(level: float, reached: float, repaired: float) -> float:
    """The share of the repaired job's gain, from `level` down, that is missing in a job that `reached` its loss.

    >>> missed(2.0, 1.5, 0.5)
    0.6666666666666666
    """
    gain = level - repaired
    return (reached - repaired) / gain if math.isfinite(repaired) and gain > 0.0 else 0.0


def from_new_weights(variation: Variation) -> Variation:
    """The same after all weights were drawn again."""
    inner = variation.prepare

    def prepare(model: nn.Module, optimizer: Optimizer) -> None:
        restart(model, optimizer)
        if inner is not None:
            inner(model, optimizer)

    return replace(variation, prepare=prepare)


def present_loss(bench: Workbench, repair: Repair) -> float:
    """The mean loss of the held batches with the present weights, under the conditions of a repair."""
    with bench.set_aside():
        if repair.variation.prepare is not None:
            repair.variation.prepare(bench.model, bench.optimizer)
        now = bench.losses(bench.held)
    return sum(now) / len(now)


def _with_targets(seen: Pass, move: Callable[[Tensor], Tensor], batch: Any) -> Any:
    return seen.with_targets(batch, move)


def realigned(seen: Pass) -> Iterator[Repair]:
    """Targets of sequences, moved by one position: not where that makes them the input."""
    for by in (1, -1):

        def move(target: Tensor, by: int = by) -> Tensor:
            return target.roll(by, 1) if target.dim() > 1 and not target.is_floating_point() else target

        rows = [t for t in seen.targets.values() if t.dim() > 1 and not t.is_floating_point() and t.shape[1] > 3]
        pairs = [(t, move(row)) for row in rows for t in seen.inputs.values() if t.shape == row.shape]
        if rows and not any(bool((t == row).float().mean() > 0.5) for t, row in pairs):  # sync: examined
            yield Repair(
                name=f"targets{by:+d}",
                what=f"with new weights and targets moved by {by:+d} position, for longer",
                cause=Cause.NO_LEARNING,
                fault=Fault.LABELS_SHUFFLED,
                advice="targets are one position off: check what is put before or taken off a sequence (tried, learns)",
                variation=Variation(prepare=restart, change=partial(_with_targets, seen, move)),
            )


@final
class RepairComparison:
    """Trials at the length of the run, and what they say about it."""

    def __init__(self, bench: Workbench, trial: RunTrial, o: Observation, base: Trial, fresh: Trial) -> None:
        self._bench, self._run, self._o, self._base, self._fresh = bench, trial, o, base, fresh
        self._steps = _LONGER * bench.num_steps
        self._last: Trial | None = None
        self._longer: Trial | None = None
        self._has_room = True

    def causes(
        self, trivial: float | None, longer: Trial | None, worn: Callable[[Trial, Trial], Diagnosis]
    ) -> Iterator[Diagnosis]:
        """What a repaired job shows to be wrong, the likeliest first; nothing where it does not get much further.

        Args:
            trivial: the loss of the best constant prediction, where it is known.
            longer: the job as it is from its present weights, where that was tried.
            worn: names what is wrong with weights where newly drawn ones get further.
        """
        level = self._fresh.start if trivial is None else trivial
        base = self._base
        if self._bench.updated < _TRAINED:  # why: a job that has not been trained may only begin slowly
            return
        reached = min(base.start, base.end, math.inf if longer is None else longer.end)
        if not math.isfinite(level) or self._o.is_adversarial:
            return
        self._has_room = ROOM * level < reached < 3.0 * level
        self._longer = longer
        if not self._has_room and len(self._o.calls) != 1:
            return
        again = self._run(
            "fresh-longer", "with new weights, for longer", Variation(prepare=restart), num_steps=self._steps
        )
        worked = list(self._worked(level, reached, again))
        worked = [one for one in worked if self._holds(one, level, reached, again)]
        best = max((one.gain for one in worked), default=0.0)
        first = [one for one in worked if one.repair.particular and one.gain >= _NEARLY * best]
        others = sorted((one for one in worked if one not in first), key=lambda one: -one.gain)
        if self._has_room and missed(level, reached, again.end) > _MISSED and not first:
            yield _told(worn(base, again), reached, again)
        for one in (*first, *others):
            repair = one.repair
            found = Diagnosis(cause=repair.cause, fault=repair.fault, advice=repair.advice)
            yield _told(found, reached, one.trial)

    def _worked(self, level: float, reached: float, again: Trial) -> Iterator[Compared]:
        best: dict[str, Compared] = {}
        for repair in self._candidates(again):
            if not self._bench.in_time():
                break
            tried = self._last = self._tried(repair)
            if tried is None:
                continue
            one = self._compared(repair, tried, level, reached, again)
            kind = repair.cause + repair.fault
            least = _MISSED_TERM if repair.variation.loss is not None else _MISSED
            if one is not None and one.missed > least and (kind not in best or one.gain > best[kind].gain):
                best[kind] = one
        for one in best.values():
            too_low = one.repair.cause == Cause.LEARNING_RATE_TOO_LOW
            if not too_low or not self._is_on_its_way(reached - one.trial.end):
                yield one

    def _candidates(self, again: Trial) -> Iterator[Repair]:
        o = self._o
        for repair in repairs(self._bench, o.passes[0], o.parameters.not_in_optimizer):
            if not self._has_room and repair.variation.loss is None:
                continue
            large = repair.name == "large-batches" and o.passes[0].num_samples > _SMALL_BATCH
            if not large and not repair.name.startswith("lr") and repair.name != "no-dropout":
                yield replace(repair, fresh=True)
        for rates in (slower(), faster(factors=(10.0, 100.0))) if self._has_room else ():
            for repair in rates:
                yield replace(repair, fresh=True)
                if not self._last or not self._last.end < again.end:  # farther off it will not be better
                    break

    def _tried(self, repair: Repair) -> Trial | None:
        variation = from_new_weights(repair.variation) if repair.fresh else repair.variation
        what = (
            repair.what
            if "new weights" in repair.what or not repair.fresh
            else f"with new weights and {_bare(repair.what)}"
        )
        try:
            return self._run(f"{repair.name}-longer", f"{what}, for longer", variation, num_steps=self._steps)
        except (RuntimeError, ValueError, TypeError, IndexError):  # changed data does not fit every loss
            return None

    def _compared(self, repair: Repair, trial: Trial, level: float, reached: float, again: Trial) -> Compared | None:
        if not trial.finite:
            return None
        if repair.variation.loss is not None:  # another loss: in its own units, with the present weights
            with self._bench.set_aside():
                now = self._bench.losses(self._bench.held, repair.variation.change, repair.variation.loss)
            own = sum(now) / len(now)
            return Compared(
                repair, trial, missed(trial.start, own, trial.end), 1.0 - trial.end / max(trial.start, 1e-12)
            )
        if repair.rescaled:
            share = trial.end / max(trial.start, 1e-12)
            return Compared(repair, trial, missed(1.0, min(reached, again.end) / level, share), 1.0 - share)
        limit = min(reached, again.end)
        if repair.eases:
            limit = min(limit, present_loss(self._bench, repair))
        apart = limit - trial.end
        if apart < _ERRORS * paired_standard_error(again.after, trial.after) and math.isfinite(again.end):
            return None
        return Compared(repair, trial, missed(level, limit, trial.end), 1.0 - trial.end / level)

    def _is_on_its_way(self, gap: float) -> bool:
        """Whether the job will be there by itself: at its present pace, within ten times the updates it has made."""
        if self._longer is None:
            what = "as it is, for longer"
            self._longer = self._run("longer", what, Variation(), num_steps=self._steps)
        now = self._longer
        error = paired_standard_error(now.before, now.after)
        fall = now.start - now.end + _LIKELY * (error if math.isfinite(error) else 0.0)
        return fall * _PATIENCE * self._bench.updated > gap * len(now.losses)

    def _holds(self, one: Compared, level: float, reached: float, again: Trial) -> bool:
        """Whether another draw of weights says the same."""
        with self._bench.other_seed():
            trial = self._tried(one.repair)
        if trial is None or not self._bench.in_time():
            return False
        second = self._compared(one.repair, trial, level, reached, again)
        return second is not None and second.missed > _SURELY * one.missed


def _told(found: Diagnosis, reached: float, trial: Trial) -> Diagnosis:
    return replace(found, evidence=f"{COMPARED}: its loss is {reached:.4g}; {trial}")


def _bare(what: str) -> str:
    for word in ("with ", "at ", "in "):
        if what.startswith(word):
            return what.removeprefix("with ")
    return what
