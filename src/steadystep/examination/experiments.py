"""The order of the trials, and the rules that turn them into causes."""

import math
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import final

from torch.optim.lr_scheduler import LRScheduler

from steadystep._utils import Attempts
from steadystep.diagnosis.causes import Cause, Fault
from steadystep.examination.checks import faults_of, partly_reached
from steadystep.examination.comparison import RepairComparison, from_new_weights, present_loss, realigned
from steadystep.examination.dependence import spread_of_outputs
from steadystep.examination.observation import Observation, faint_gradients, observe_program, trivial_loss
from steadystep.examination.pairing import best_answers
from steadystep.examination.parameters import restart, restart_plainly
from steadystep.examination.repairs import Repair, repairs
from steadystep.examination.rulings import (
    diagnosis,
    is_better,
    learns_well,
    no_targets,
    outputs_collapse,
    repaired_by,
    suspects,
    worn,
)
from steadystep.examination.workbench import Trial, Variation, Workbench, paired_standard_error
from steadystep.records import Diagnosis

HAS_LEARNED = "the model has learned"
UNDECIDED = ("no sign of a fault; learning is not judged", "no trial learns")
"""What is said where no trial says anything: it refutes nothing that the run has shown."""
_CLEARLY, _FAR = 0.1, 0.25  # of the present loss
_BELOW = 0.95  # of the loss of the best constant
_LONGER = 5
_TINY_BATCH = 4
_RESCALED = 0.3  # of its own first loss
_HARDLY = 0.3  # of the best repair
_ABOVE, _EXPLODED = 3.0, 30.0  # times the loss of a constant
_FITS = 0.5  # of the loss of one batch
_UNLEARNED, _KNOWS, _SURELY = 0.05, 0.8, 3.0


@final
class Experiments:
    """The order of the trials, and the rules that turn them into causes."""

    def __init__(
        self,
        bench: Workbench,
        scheduler: LRScheduler | None,
        progress: Callable[[str], None],
    ) -> None:
        self._bench, self._progress = bench, progress
        self._scheduler = scheduler
        self.trials: list[Trial] = []
        self.attempt = Attempts()

    def run(self) -> tuple[Diagnosis, ...]:
        """Everything, from the first look to the causes."""
        self._progress("observing a few passes")
        observation = observe_program(self._bench, self._scheduler, self.attempt)
        found = list(faults_of(observation, self.attempt))
        seen = observation.passes[0]
        base = self._trial(
            "as-is",
            "as it is",
            Variation(),
            at_end=lambda: self.attempt(None, spread_of_outputs, self._bench, self._bench.batches[0], seen),
        )
        if found:
            return tuple(found)
        if not self._bench.in_time():
            return (Diagnosis(evidence=f"out of time after single passes, which show no fault; {base}"),)
        unknown = Diagnosis(evidence=f"single passes show no fault, and not all trials could be made; {base}")
        return self.attempt((unknown,), self._explained, observation, base)

    def _explained(self, o: Observation, base: Trial) -> tuple[Diagnosis, ...]:
        fresh = self._trial("fresh", "with new weights", Variation(prepare=restart))
        # why with new weights too: a part that has died gets no gradient either, and is a matter of trials
        unreached = partly_reached(o, set(base.still) - o.reached_fresh)
        if unreached is not None:
            return tuple(suspects(o)) if o.ignored else (unreached,)
        alike = outputs_collapse(o, base, fresh)
        if alike is not None or not o.is_adversarial:
            return self._judged(o, base, fresh) if alike is None else (alike,)
        return (Diagnosis(evidence=f"no sign of a fault; learning is not judged for adversarial losses; {base}"),)

    def _judged(self, o: Observation, base: Trial, fresh: Trial) -> tuple[Diagnosis, ...]:
        trivial = trivial_loss(o)
        left_out = o.parameters.not_in_optimizer
        free = self.attempt(None, best_answers, self._bench, self._bench.batches[0], o.passes[0])
        if free is not None and free.ignore_targets and trivial is None:
            return (no_targets(free),)
        halved = trivial is not None and base.start <= 0.5 * trivial
        if not halved and (found := list(suspects(o))):
            return tuple(found)
        if learns_well(base, trivial) and not left_out:
            return self._compared(o, base, fresh, trivial) or (Diagnosis(evidence=f"it learns; {base}"),)
        knows = self._knows(o, base, fresh, trivial)
        longer = base if knows else self._longer()
        learns = learns_well(longer, trivial)
        worked = list(self._repaired(o, longer, fresh, trivial, knows=knows, learns=learns))
        found = [repaired_by(repair, trial, longer) for repair, trial in worked]
        best = min((trial.end for repair, trial in worked if not repair.rescaled), default=math.inf)
        if learns and not found:
            further = self._compared(o, base, fresh, trivial, longer)
            return further or (Diagnosis(evidence=f"it learns; {longer}"),)
        if not learns and is_better(fresh, longer, margin=_FAR if knows else _CLEARLY):
            found.insert(0 if fresh.end < 2.0 * best else 1, worn(o, longer, fresh))
        if found:
            return tuple(found)
        if knows:
            healthy = Diagnosis(evidence=f"{HAS_LEARNED}: other samples' inputs raise its loss; {base}")
            return self._compared(o, base, fresh, trivial) or (healthy,)
        further = self._compared(o, longer, fresh, trivial, longer)
        return further or self._unexplained(o, longer, trivial)

    def _compared(
        self, o: Observation, base: Trial, fresh: Trial, trivial: float | None, longer: Trial | None = None
    ) -> tuple[Diagnosis, ...]:
        """What a repaired job shows to be wrong with one that learns."""
        comparison = RepairComparison(self._bench, self._trial, o, base, fresh)
        return tuple(comparison.causes(trivial, longer, lambda now, new: worn(o, now, new)))

    def _longer(self) -> Trial:
        return self._trial("longer", "as it is, for longer", Variation(), num_steps=_LONGER * self._bench.num_steps)

    def _trial(
        self,
        name: str,
        what: str,
        variation: Variation,
        *,
        num_steps: int | None = None,
        at_end: Callable[[], float | None] | None = None,
    ) -> Trial:
        self._progress(what)
        trial = self._bench.trial(name, what, variation, num_steps=num_steps, at_end=at_end)
        self.trials.append(trial)
        return trial

    def _knows(self, o: Observation, base: Trial, fresh: Trial, trivial: float | None) -> bool:
        """Whether the present weights have learned something, as far as held batches tell."""
        if not base.finite:
            return False
        lead = fresh.start - base.start
        surely = min(_SURELY * paired_standard_error(fresh.before, base.before), 0.5 * abs(fresh.start))
        leads = lead > max(_UNLEARNED * abs(fresh.start), surely)
        if trivial is not None:  # their loss is below that of the best constant, and not so with any weights
            below = base.start < _BELOW * trivial and leads
            return base.start < _KNOWS * trivial or (below and self._needs_its_inputs(o))
        if o.passes[0].targets and o.passes[0].num_samples > 1:
            return leads and self._needs_its_inputs(o)
        return leads

    def _needs_its_inputs(self, o: Observation) -> bool:
        with self._bench.set_aside():
            return self._follows(o) == 1.0

    def _follows(self, o: Observation) -> float:
        """1 where the loss of held batches is higher if targets meet the inputs of other samples; else 0."""
        held, seen = self._bench.held, o.passes[0]
        if seen.num_samples < 2:
            return 0.0
        plain = self._bench.losses(held)
        turned = self._bench.losses(held, lambda batch: seen.with_inputs(batch, lambda t: t.roll(1, 0)))
        worse = fmean(turned) - fmean(plain)
        return float(worse > max(_UNLEARNED * abs(fmean(plain)), _SURELY * paired_standard_error(turned, plain)))

    def _repaired(
        self, o: Observation, base: Trial, fresh: Trial, trivial: float | None, *, knows: bool, learns: bool
    ) -> Iterator[tuple[Repair, Trial]]:
        """Repairs that end clearly below where the run is and below what the run does by itself, the best first."""
        worked, margin = [], _FAR if knows or learns else _CLEARLY
        # a run that has learned nothing stands at the level of a guess, however high it began
        level = math.inf if knows or learns or not base.end > 0 else min(base.end, trivial or math.inf)
        hardly = trivial is not None and base.start > _KNOWS * trivial
        frozen = o.parameters.frozen if hardly or not knows else ()
        for repair in repairs(self._bench, o.passes[0], o.parameters.not_in_optimizer, frozen):
            if not self._bench.in_time():
                break
            if repair.particular if learns else repair.fresh or repair.particular or not knows:
                variation = from_new_weights(repair.variation) if repair.fresh else repair.variation
                try:
                    trial = self._trial(repair.name, repair.what, variation)
                except (RuntimeError, ValueError, TypeError, IndexError):  # changed data does not fit every loss
                    continue
                others = (base,) if repair.particular and not repair.fresh else (base, fresh)
                usual = max(base.gain, fresh.gain, 0.0)
                helps = (
                    trial.learns and trial.gain > _RESCALED + 2.0 * usual
                    if repair.rescaled
                    else is_better(trial, *others, margin=margin, level=level)
                )
                # why again: what dropout costs while it is on says nothing of what was learned with it
                if helps and repair.eases:
                    now = present_loss(self._bench, repair)
                    helps = trial.end < now - margin * abs(now)
                # far above the loss of a constant is no success, and to come down to it says nothing about a rate
                most = 1.0 if repair.name.startswith("lr") else _ABOVE
                helps = helps and (repair.rescaled or trivial is None or trial.end < most * trivial)
                worked += [(repair, trial)] if helps else []
        best: dict[str, tuple[Repair, Trial]] = {}
        for repair, trial in worked:
            kind = repair.cause + repair.fault
            if kind not in best or trial.gain > best[kind][1].gain:
                best[kind] = (repair, trial)
        top = max((trial.gain for _, trial in best.values()), default=0.0)
        # why in their order: a rate that helps may only make up for what a more particular repair removes
        return iter(sorted(best.values(), key=lambda pair: not pair[0].particular and pair[1].gain < _HARDLY * top))

    def _moved(self, o: Observation, base: Trial, trivial: float) -> tuple[Diagnosis, ...]:
        """What targets that are one position off show when they are moved."""
        for repair in realigned(o.passes[0]):
            trial = self._trial(repair.name, repair.what, repair.variation, num_steps=_LONGER * self._bench.num_steps)
            if learns_well(trial, _KNOWS * trivial):
                return (repaired_by(repair, trial, base),)
        return ()

    def _unexplained(self, o: Observation, base: Trial, trivial: float | None) -> tuple[Diagnosis, ...]:
        follows = False  # why not with the present weights: these have seen the held batches
        for name, what, prepare in (
            ("fresh-longer", "with new weights, for longer", restart),
            ("plain-init-longer", "with weights drawn at 1 / sqrt(inputs), for longer", restart_plainly),
        ):
            how, steps = Variation(prepare=prepare), _LONGER * self._bench.num_steps
            trial = self._trial(name, what, how, num_steps=steps, at_end=lambda: self._follows(o))
            follows = follows or trial.at_end == 1.0
            if learns_well(trial, trivial) and is_better(trial, base, margin=_CLEARLY):
                return (worn(o, base, trial),)
        if trivial is not None and (moved := self._moved(o, base, trivial)):
            return moved
        if trivial is not None and o.passes[0].loss > _EXPLODED * trivial and base.end > trivial:
            what = f"a constant prediction has a loss of {trivial:.4g}, this model began far above; {base}"
            return (diagnosis(Cause.EXPLODING_GRADIENT, what),)
        if vanishing := faint_gradients(o):
            return (diagnosis(Cause.VANISHING_GRADIENT, vanishing),)
        if trivial is None and (base.start < 0 or not (o.passes[0].targets or o.contrasts)):
            what = "no sign of a fault; learning is not judged: without targets a flat loss may be the best there is"
            return (Diagnosis(evidence=f"{what}; {base}"),)
        one = self._trial(
            "one-batch",
            "with new weights on one batch again and again",
            Variation(prepare=restart, batches=self._bench.batches[:1]),
            num_steps=_LONGER * self._bench.num_steps,
        )
        if o.passes[0].num_samples <= _TINY_BATCH:
            what = f"batches of {o.passes[0].num_samples}: noise hides what they have in common; {base}"
            return (diagnosis(Cause.BATCH_SIZE_UNFIT, what),)
        if follows:
            what = "no trial learns, but other samples' inputs raise the loss: targets belong to their inputs"
            return (Diagnosis(evidence=f"{what}; {base}"),)
        if one.finite and one.losses and one.losses[-1] < _FITS * min(one.losses[0], trivial or math.inf):
            learned = f"{one.losses[0]:.4g} -> {one.losses[-1]:.4g}"
            what = f"a single batch can be memorized ({learned}), but nothing carries over to other batches; {base}"
            advice = "check that targets belong to their inputs: shuffled together, in the same order"
            return (Diagnosis(cause=Cause.NO_LEARNING, fault=Fault.LABELS_SHUFFLED, evidence=what, advice=advice),)
        return (diagnosis(Cause.NO_LEARNING, f"not learning, cause unknown: no trial learned; {base}"),)
