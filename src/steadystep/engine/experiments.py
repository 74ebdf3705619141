"""Experiments with a guarded run: its own loss and batches, and one story with what it has shown so far."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep.config import Config
from steadystep.diagnosis.candidates import with_candidates
from steadystep.diagnosis.causes import CONSEQUENCES, EXPLAINED, Cause, Fault
from steadystep.diagnosis.conclusion import NOT_JUDGED
from steadystep.diagnosis.facts import Facts
from steadystep.diagnosis.graph_evidence import CUT_OFF
from steadystep.diagnosis.learning import hardly_learned, has_learned, is_judged, supervised
from steadystep.diagnosis.ranking import proven, rank
from steadystep.engine.arguments import examined
from steadystep.engine.parts import Parts
from steadystep.errors import UnsupportedError
from steadystep.examination import Examination, examine
from steadystep.examination.comparison import COMPARED
from steadystep.examination.experiments import HAS_LEARNED, UNDECIDED
from steadystep.optimizers import CombinedOptimizer
from steadystep.records import Diagnosis

_MOST = 64  # remembered batches


def examine_guarded(
    parts: Parts,
    model: nn.Module,
    optimizer: Optimizer | None,
    config: Config,
    batches: Iterable[Any] | None,
    loss: Callable[[Any], Tensor] | None,
    options: Mapping[str, Any],
) -> Examination:
    """See `Guard.examine`."""
    if parts.ranks.size > 1:
        raise UnsupportedError("examine works in a single process: run it on one rank without the others")
    if optimizer is None or isinstance(optimizer, CombinedOptimizer):
        raise UnsupportedError("examine needs a guard with one optimizer: call steadystep.examine for each of them")
    batches, compute = examined(parts.recovery.remembered(_MOST), batches, loss)

    def under_precision(batch: Any) -> Tensor:
        with parts.precision.autocast():
            return compute(batch)

    if parts.precision.casts:
        under_precision.plain = compute  # type: ignore[attr-defined]
    history = parts.run_history
    facts = history.facts()
    known: dict[str, Any] = {"max_grad_norm": config.training.max_grad_norm, "num_updates": facts.trace.num_updates}
    # why not while it rises: a warmup has not come to the full rate yet
    if (rates := facts.trace.lrs) and max(rates) > rates[-1]:
        known["largest_rate"] = max(rates)
    done = examine(model, optimizer, under_precision, batches, **{**known, **options})
    seen = rank(facts)
    story = told_together(facts, seen, done)
    if story[0] in seen:  # why: what single passes or a trial have shown needs no candidates
        story = with_candidates(story, facts)
    parts.progress.examined = parts.progress.attempts, story
    return replace(done, causes=story)


def told_together(facts: Facts, seen: tuple[Diagnosis, ...], done: Examination) -> tuple[Diagnosis, ...]:
    """One story of a run and of experiments with it.

    Args:
        facts: what is known about the run.
        seen: its diagnosis.
        done: the experiments.
    """
    seen_as_is = proven(facts)
    rates = sorted(facts.trace.lrs)
    if rates and rates[len(rates) // 2] < 0.1 * facts.structure.announced:
        seen_as_is |= {(Cause.LEARNING_RATE_TOO_LOW.value, "")}  # why: trials take the full rate of a schedule
    judged = is_judged(facts) and not facts.measured.loop.turns
    if done.causes[0].evidence.startswith((HAS_LEARNED, *UNDECIDED)) or not judged:
        seen_as_is |= {(d.cause, d.fault) for d in seen}  # why: no trial got any further, so none refutes the run
    if seen[0].cause == Cause.HEALTHY and any(facts.trace.first_norms):  # a policy that has nothing left to gain
        gained = [d for d in done.causes if (d.cause, d.fault) != (Cause.ZERO_GRADIENT, "")]
        done = replace(done, causes=tuple(gained) or seen)
    learned = has_learned(facts) and not hardly_learned(facts)
    tried = credible(seen[0], done.causes, learned=learned, judged=judged, known=judged and supervised(facts))
    return one_story(seen, tried, seen_as_is)


_OF_THE_LOOP = frozenset(
    {
        *(Cause.MISSING_ZERO_GRAD, Cause.SCHEDULE_ERROR, Cause.LOST_MOMENTS, Cause.POISONED_MOMENTS),
        *(Cause.NON_FINITE_INPUT, Cause.FORWARD_OVERFLOW, Cause.LOSS_SCALE_COLLAPSE, Cause.GRADIENT_UNDERFLOW),
        *(Cause.REPEATED_BATCH, Cause.POLICY_DRIFT, Cause.ENTROPY_COLLAPSE, Cause.FLAT_REWARD),
        *(Cause.POLICY_MISMATCH, Cause.RATIO_EXPLOSION, Cause.REWARD_HACKING, Cause.DEAD_GROUPS),
        *(Cause.VALUE_DIVERGENCE, Cause.POLICY_COLLAPSE, Cause.BAD_ADVANTAGES),
        *(Cause.METRIC_OUT_OF_BOUNDS, Cause.EXCEPTION_IN_STEP, Cause.CLOSURE_NOT_REPEATABLE, Cause.ODD_REPLICA),
    }
)
"""Mistakes between the steps, or of a time that is over: experiments take their own steps and see none of them."""

_REFUTED_BY_LEARNING = frozenset(
    {
        *(Cause.NO_LEARNING, Cause.LEARNING_RATE_TOO_LOW, Cause.BATCH_SIZE_UNFIT, Cause.CLIPPING_TOO_TIGHT),
        *(Cause.OSCILLATION, Cause.UNSCALED_DATA, Cause.DEAD_UNITS, Cause.SATURATION, Cause.VANISHING_GRADIENT),
        *(Cause.ZERO_GRADIENT, Cause.POOR_INITIALISATION, Cause.SUSPICIOUS_PERFECTION, Cause.UNKNOWN),
    }
)
"""What a run that can be seen to learn does not have, whatever its curve looks like."""
_OF_STRUCTURE: frozenset[str] = frozenset(
    {
        *(Cause.ZERO_GRADIENT, Fault.WRONG_OPTIMIZER_PARAMS, Fault.SOFTMAX_AXIS, Fault.WRONG_LOSS),
        *(Fault.BATCH_DEPENDENCE, Fault.EVAL_MODE, Fault.FROZEN_PARAMETERS, Cause.ENTROPY_COLLAPSE, Fault.PRECISION),
    }
)
"""Read off the program itself: they hold whatever the loss means."""
_NOT_WHERE_IT_LEARNED: frozenset[str] = frozenset(
    {
        *(Cause.NO_LEARNING, Cause.LEARNING_RATE_TOO_LOW, Cause.FLAT_REWARD, Fault.OUTPUT_INDEPENDENT_OF_INPUT),
        *(Fault.LABELS_SHUFFLED, Fault.CONSTANT_TARGETS, Fault.CONSTANT_INPUTS, Fault.FROZEN_PARAMETERS),
    }
)
_WITHOUT_GRADIENT = frozenset(
    {
        *(Fault.WRONG_LOSS, Fault.SOFTMAX_AXIS, Fault.CONSTANT_TARGETS, Fault.CONSTANT_INPUTS),
        Fault.OUTPUT_INDEPENDENT_OF_INPUT,
    }
)
"""Reasons for a gradient of zero."""
_NO_NUMBERS = frozenset({Cause.NON_FINITE_LOSS, Cause.NON_FINITE_GRADIENT})
_BREAKS = frozenset(
    {
        *(Cause.LEARNING_RATE_TOO_HIGH, Cause.UNSCALED_DATA, Cause.POOR_INITIALISATION, Cause.EXPLODING_GRADIENT),
        *(Cause.NON_FINITE_INPUT, Cause.FORWARD_OVERFLOW, Cause.GRADIENT_UNDERFLOW, *_NO_NUMBERS),
    }
)
"""Reasons for a loss that is no number."""
_WEAK = frozenset({Fault.LABELS_SHUFFLED})
"""Concluded where nothing else explains that nothing is learned."""


def credible(
    seen: Diagnosis, tried: Sequence[Diagnosis], *, learned: bool, judged: bool = True, known: bool = False
) -> Sequence[Diagnosis]:
    """Return what experiments may claim about a run, most of all where nothing was seen to be wrong.

    Args:
        seen: the first diagnosis of the run.
        tried: those of experiments.
        learned: the run itself has shown that it learns.
        judged: the level of the loss says something: not that of a policy or an adversary.
        known: it is that of a loss function that compares outputs with targets, so that trials can be judged by it.
    """
    if seen.cause != Cause.HEALTHY:
        kept = [d for d in tried if judged or (d.fault or d.cause) in _OF_STRUCTURE]
        return kept or [seen]
    if not judged or (NOT_JUDGED in seen.evidence and not known):  # trials go by the level of the loss as well
        tried = [d for d in tried if (d.fault or d.cause) in _OF_STRUCTURE]
    if NOT_JUDGED not in seen.evidence:  # why: short trials do not refute a fall that a long run has shown
        tried = [d for d in tried if d.fault or d.cause != Cause.NO_LEARNING]
    if learned:
        tried = [d for d in tried if (d.fault or d.cause) not in _NOT_WHERE_IT_LEARNED or _is_compared(d)]
    return tried or [seen]


def _goes_before(seen: Diagnosis, tried: Diagnosis) -> bool:
    """Whether what was seen comes before a comparison: not what was concluded for want of another reason."""
    return _is_compared(tried) and seen.fault not in _WEAK


def _is_compared(found: Diagnosis) -> bool:
    return found.evidence.startswith(COMPARED)


def one_story(
    seen: Sequence[Diagnosis], tried: Sequence[Diagnosis], proven: Container[tuple[str, str]] = ()
) -> tuple[Diagnosis, ...]:
    """Put together what the run showed (`seen`) and what experiments showed (`tried`), the likeliest first.

    Args:
        seen: of the run.
        tried: of experiments.
        proven: cause and fault of what was seen as it is; the others were concluded from curves.

    >>> seen, tried = Diagnosis(cause="missing-zero-grad"), Diagnosis(cause="learning-rate-too-high")
    >>> [diagnosis.cause for diagnosis in one_story([seen], [tried])]
    ['missing-zero-grad', 'learning-rate-too-high']
    """
    healthy = all(diagnosis.cause == Cause.HEALTHY for diagnosis in tried)
    faulty = [diagnosis for diagnosis in seen if diagnosis.cause != Cause.HEALTHY]
    if healthy:
        kept = [d for d in faulty if (d.cause, d.fault) in proven or d.cause not in _REFUTED_BY_LEARNING]
        return tuple(kept) or tuple(tried)
    sure = {d.cause + d.fault for d in seen[:1] if (d.cause, d.fault) in proven or d.cause in _OF_THE_LOOP}
    if "(tried" in tried[0].advice:  # a repair that works says more than an effect that was seen
        sure -= {Cause.NO_LEARNING + Fault.OUTPUT_INDEPENDENT_OF_INPUT}
    if tried[0].cause not in _BREAKS:  # nothing else makes a loss that is no number
        sure |= {d.cause + d.fault for d in seen[:1] if d.cause in _NO_NUMBERS}
    if tried[0].fault in _WITHOUT_GRADIENT and not any(CUT_OFF in d.evidence for d in seen[:1]):
        sure -= {Cause.ZERO_GRADIENT.value, Cause.ZERO_GRADIENT + Fault.FROZEN_PARAMETERS}
    tried = sorted(tried, key=lambda d: d.cause + d.fault not in sure)
    named = {(diagnosis.cause, diagnosis.fault) for diagnosis in tried}
    others = [diagnosis for diagnosis in faulty if (diagnosis.cause, diagnosis.fault) not in named]
    unknown = all(diagnosis.cause == Cause.NO_LEARNING and not diagnosis.fault for diagnosis in tried)
    by_trial = tried[0].fault in _WEAK
    # a comparison says that something is wrong, and what helps; what was seen in the run itself comes before it
    # where both name the same first, the comparison has confirmed it
    confirmed = (tried[0].cause, tried[0].fault) == (seen[0].cause, seen[0].fault) if seen else False
    first = [d for d in others if unknown or d.cause + d.fault in sure or (_goes_before(d, tried[0]) and not confirmed)]
    effects = EXPLAINED.get(seen[0].fault or seen[0].cause, set()) if seen else set()
    if seen and seen[0].cause == Cause.EXPLODING_GRADIENT:
        effects = CONSEQUENCES[Cause.EXPLODING_GRADIENT]
    if seen and seen[0].cause == Cause.LEARNING_RATE_TOO_HIGH:
        effects = {Cause.SATURATION, Cause.DEAD_UNITS}  # what too large steps have left of the units
    if tried[0].fault == Fault.OUTPUT_INDEPENDENT_OF_INPUT and seen[0].cause == Cause.ZERO_GRADIENT:
        effects = set()  # an input that the loss does not notice is why what reads it gets no gradient
    first += [d for d in others if d is seen[0] and d not in first and (tried[0].fault or tried[0].cause) in effects]
    first += [d for d in others if by_trial and d not in first and d is seen[0] and d.fault not in _WEAK]
    return (*first, *tried, *(diagnosis for diagnosis in others if diagnosis not in first))
