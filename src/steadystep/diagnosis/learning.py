"""Whether a run has learned anything: its loss against its own noise and against the best constant prediction."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, pstdev
from typing import final

from steadystep._utils.numbers import rescaled_at
from steadystep.diagnosis.facts import Facts
from steadystep.records import BatchPartStats, InputStats

TOO_SHORT = 50
"""Updates: of a run of fewer nothing is said."""
JUDGED_AFTER = 100
"""Updates before a loss that stands at the level of a constant prediction counts."""
_FEW = 16  # samples
_RESCALED = 0.1  # of the size that inputs have in the batch
_WIDER = 1.5  # times the standard deviation of the first targets
_NEAR = 0.8  # of the loss of a constant prediction
_WELL_BELOW = 2 / 3  # of the loss of a constant prediction
_LEAST_GAIN = 0.02  # of the level; below, a change of the loss is not called learning
_SIGMAS = 3.0
_BLUR = 0.2  # of the level: with more noise than this nothing is concluded from the level, as with heavy-tailed targets
_TARGETS = ("label", "labels", "target", "targets", "y")
_OF_A_POLICY = frozenset({"actor", "critic", "policy"})
_REWARDS = ("reward", "return", "advantage")
_CLASSES = ("cross-entropy", "nll", "nll from probabilities")
_BINARY = ("bce with logits", "bce")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The loss of a run, from its first updates to its last quarter."""

    start: float
    end: float
    error: float
    """Standard error of the difference."""
    end_error: float
    """Standard error of the end."""
    settled: bool
    base: float | None = None
    """Loss of the best constant prediction, where the loss function is known."""
    base_text: str = ""
    base_error: float = 0.0
    """Standard error of the base: it is known from some batches only."""

    @property
    def gained(self) -> bool:
        """The loss has fallen by more than its noise, and by more than 2 %."""
        return self.start - self.end > max(_SIGMAS * self.error, _LEAST_GAIN * abs(self.start))

    @property
    def beats_base(self) -> bool:
        """It is below the loss of the best constant prediction."""
        return self.base is not None and self.base - self.end > max(_SIGMAS * self.end_error, _LEAST_GAIN * self.base)

    @property
    def at_base(self) -> bool:
        """It has come to rest no lower than the best constant prediction, as far as its noise lets one see."""
        error = math.hypot(self.end_error, self.base_error)
        if self.base is None or self.beats_base or _SIGMAS * error > _BLUR * self.base:
            return False
        return self.settled or not self.gained

    @property
    def stood_still(self) -> bool:
        """It has not fallen, and a fall would have been seen through its noise."""
        return not self.gained and not self.beats_base and _SIGMAS * self.error <= _BLUR * abs(self.start)

    def __str__(self) -> str:
        went = f"the loss went from {self.start:.4g} to {self.end:.4g}"
        return went if self.base is None else f"{went}; {self.base_text} is {self.base:.4g}"


def progress(facts: Facts) -> Progress | None:
    """None for a run that is too short, or whose loss has a level that says nothing."""
    curve, losses = facts.curve, facts.trace.losses
    if curve is None or facts.trace.num_updates < TOO_SHORT or not is_judged(facts):
        return None
    first = losses[: max(8, len(losses) // 8)]
    last = losses[-max(16, len(losses) // 4) :]
    base, text = base_level(facts)
    start, start_error = _start(facts, first)
    return Progress(
        start=start,
        end=fmean(last),
        error=math.hypot(start_error, _error(last)),
        end_error=_error(last),
        settled=curve.settled,
        base=base,
        base_text=text,
        # why the noise of the loss: both are means over batches of as many samples
        base_error=pstdev(last) / math.sqrt(max(1, num_looks(facts))),
    )


def _start(facts: Facts, first: Sequence[float]) -> tuple[float, float]:
    """The mean of the first losses, and its error; the very first loss where the next ones exploded."""
    very_first, noise = facts.trace.first[0], facts.curve.noise if facts.curve is not None else 0.0
    if median(facts.trace.first) > max(3.0 * very_first, very_first + 10.0 * noise):
        return very_first, noise
    return max(fmean(facts.trace.first), fmean(first)), _error(first)


def is_judged(facts: Facts) -> bool:
    """Whether the level of the loss says anything: not for a policy, an adversary or a loss below zero."""
    return not (facts.signed or facts.opposed or is_policy(facts) or has_moving_targets(facts) or changed_loss(facts))


def changed_loss(facts: Facts) -> str:
    """The program multiplied its loss in mid-run: levels from before and after say nothing about each other."""
    trace = facts.trace
    if (found := rescaled_at(tuple(trace.losses), tuple(trace.norms), tuple(trace.lrs))) is None:
        return ""
    return f"at step {trace.steps[found[0]]} loss and gradient became {found[1]:.3g} times as large"


def has_moving_targets(facts: Facts) -> bool:
    """Whether what the loss compares with has wandered off, as values that a network makes by itself do."""
    trail = facts.measured.outputs
    if trail.first is None or trail.last is None or trail.first.target is None or trail.last.target is None:
        return False
    first, now = trail.first.target, trail.last.target
    if first.whole or first.rows < _FEW or not math.isnan(first.entropy) or first.name != now.name:
        return False
    if min(first.std, now.std) > 0.0 and not 1.0 / _WIDER < now.std / first.std < _WIDER:
        return True  # a curriculum
    return abs(now.mean - first.mean) > max(0.5, _SIGMAS / math.sqrt(first.rows)) * min(first.std, now.std) > 0.0


def is_policy(facts: Facts) -> bool:
    """Whether rewards come with the batches or the metrics, or a part of the model is named like a policy's."""
    named = any(not _OF_A_POLICY.isdisjoint(name.split(".")) for name in facts.structure.trained)
    return named or facts.measured.rewarded or reward(facts) is not None


def acts(facts: Facts) -> bool:
    """Whether probabilities of whole numbers in the batch are picked out and weighted by numbers beside them."""
    last, parts = facts.measured.outputs.last, _parts(facts)
    if last is None or not last.policy:
        return False
    return any(p.whole for p in parts[1:]) and any(not p.whole and not p.shape for p in parts[1:])


def reward(facts: Facts) -> BatchPartStats | None:
    """The part of the batch that holds the rewards."""
    found = next((p for p in _parts(facts) if any(word in plain(p.name) for word in _REWARDS)), None)
    if found is None and acts(facts):
        return next(part for part in reversed(_parts(facts)) if not part.whole and not part.shape)
    return found


def target(facts: Facts) -> BatchPartStats | None:
    """The targets: what the loss was found to be of, else what is called so, else the last of several tensors."""
    parts, outputs = _parts(facts), facts.measured.outputs
    kind, name = outputs.loss
    if kind:
        heard = () if outputs.last is None or outputs.last.target is None else (outputs.last.target,)
        return next((part for part in (*parts, *heard) if part.name == name), None)
    found = [part for part in parts if plain(part.name) in _TARGETS]
    return found[0] if found else (parts[-1] if len(parts) > 1 else None)


def raw_inputs_of(facts: Facts) -> InputStats | None:
    """The inputs as the batches hold them; None where the model is given numbers of a much smaller size."""
    inputs, last = facts.inputs, facts.measured.outputs.last
    if inputs is None or last is None or math.isnan(last.input_rms):
        return inputs
    return None if last.input_rms < _RESCALED * max(abs(inputs.mean), inputs.std) else inputs


def supervised(facts: Facts) -> bool:
    """Whether the loss is known to compare the output with a tensor of the batch, and with no adversary's."""
    return bool(facts.measured.outputs.loss[0]) and not is_policy(facts) and not facts.opposed


def learns(facts: Facts) -> bool:
    """Whether the loss has fallen to half, of that of a constant prediction where it is known, and is near its best."""
    found = progress(facts)
    if found is None or not facts.going_well:
        return False
    level = found.start if found.base is None else min(found.start, 1.2 * found.base)
    return found.end <= 0.5 * level and (found.base is None or found.beats_base)


def is_well_below(facts: Facts) -> bool:
    """Whether the loss, risen again or not, is below two thirds of that of a constant prediction."""
    found = progress(facts)
    return found is not None and found.base is not None and found.gained and found.end < _WELL_BELOW * found.base


def stuck(facts: Facts) -> Progress | None:
    """A run that has learned nothing: at the level of a constant prediction, or where it began."""
    found = progress(facts)
    if found is None or facts.trace.num_updates < JUDGED_AFTER:
        return None
    return found if found.at_base or found.stood_still else None


def below_constant(facts: Facts) -> bool:
    """Whether the loss is known to be no better than the best constant prediction, moving or not."""
    found = progress(facts)
    late = facts.trace.num_updates >= JUDGED_AFTER
    return found is not None and found.base is not None and not found.beats_base and late


def worse_than_constant(facts: Facts) -> Progress | None:
    """A loss that is clearly above that of the best constant prediction, after many updates."""
    found = progress(facts)
    if found is None or found.base is None or facts.trace.num_updates < JUDGED_AFTER:
        return None
    return found if found.end - found.base > max(_SIGMAS * found.end_error, 0.1 * found.base) else None


def unlearned(facts: Facts) -> Progress | None:
    """A run that is known to be no better than a constant prediction, at rest or not, or has not moved."""
    return stuck(facts) or worse_than_constant(facts)


def hardly_learned(facts: Facts) -> bool:
    """Whether the loss is known to be near that of a constant prediction still, or has not moved."""
    found = progress(facts)
    late = facts.trace.num_updates >= JUDGED_AFTER and not has_floor(facts)
    near = late and found is not None and found.base is not None and found.end > _NEAR * found.base
    return near or unlearned(facts) is not None


def nears_floor(facts: Facts) -> bool:
    """Whether a loss that cannot come near zero has fallen below that of a constant prediction."""
    found = progress(facts) if has_floor(facts) else None
    return found is not None and found.gained and found.base is not None and found.end < found.base


def has_floor(facts: Facts) -> bool:
    """Whether the loss cannot come near zero: binary cross-entropy of targets between 0 and 1."""
    part = target(facts)
    return part is not None and math.isnan(part.entropy) and facts.measured.outputs.loss[0] in _BINARY


def base_level(facts: Facts) -> tuple[float | None, str]:
    """The loss of the best constant prediction, and what it is called."""
    kind, part = facts.measured.outputs.loss[0], target(facts)
    if not kind or part is None:
        return None, ""
    base, text = base_of(kind, part)
    return (None if base is None else base * facts.measured.outputs.scale), text


def num_looks(facts: Facts) -> int:
    """Batches in which the targets were measured."""
    part, measured = target(facts), facts.measured
    heard = part is not None and measured.outputs.last is not None and part is measured.outputs.last.target
    return measured.outputs.count if heard else 0 if measured.batch is None else measured.batch.batches


def base_of(kind: str, part: BatchPartStats) -> tuple[float | None, str]:
    """The same, for a kind of loss and its target."""
    if kind in _CLASSES and part.entropy > 0.02:
        return part.entropy, "the entropy of the labels"
    if kind == "cross-entropy" and part.marginal > 0.02:
        return part.marginal, "the entropy of the mean target"
    if kind == "kl" and part.marginal - part.conditional > 0.02:
        return part.marginal - part.conditional, "the divergence of the targets from their mean"
    if kind in _BINARY and 0.0 <= part.smallest < part.largest <= 1.0 and part.binary > 0.02:
        return part.binary, "the entropy of the labels"
    if kind == "mse" and part.variance > 0.0:
        return part.variance, "the variance of the targets"
    if kind == "sum of squares" and part.variance > 0.0:
        return part.variance * part.rows * math.prod(part.shape), "the squared deviation of the targets"
    if part.rows < _FEW:  # why: the median of a few is nearer to them than that of all
        return None, ""
    if kind == "l1" and part.deviation > 0.0:
        return part.deviation, "the mean deviation of the targets"
    if kind == "huber" and part.huber > 0.0:
        return part.huber, "the loss of their mean"
    return None, ""


def plain(name: str) -> str:
    """The key of a part of the batch, without its brackets."""
    return name.strip("[]'\".").lower()


def _parts(facts: Facts) -> Sequence[BatchPartStats]:
    return () if facts.measured.batch is None else facts.measured.batch.parts


def _error(losses: Sequence[float]) -> float:
    return pstdev(losses) / math.sqrt(len(losses))


def has_learned(facts: Facts) -> bool:
    """Whether the run has learned something, by half of its loss or below the best constant prediction."""
    found = progress(facts)
    return learns(facts) or (found is not None and found.gained and found.beats_base)
