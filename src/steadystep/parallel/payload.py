"""What one rank says about a step, as numbers that may be added up over all ranks, and what the sum means.

Sums only, so that one all-reduce serves everything and its size does not grow with the ranks:

    a mean            the sum, divided by the number of ranks; NaN or infinity on one of them stays
    a norm            the sum of |local part|² ÷ the number of ranks that hold that part: right on any
                      mesh; fp64 holds the square of any fp32 number, and NaN in one copy stays
    the largest       the fourth root of the mean fourth power: between the mean and the largest
    whether, how many a count
    who               one bit per rank, 48 to a number: adding different powers of two sets bits
    the same?         see `same_on_all_ranks`
    the state         how many ranks looked at it, and how many found what no training comes to; which tensors is asked
                      only then, because each rank may hold others

Everything here is plain numbers and can be tried without a second process.
"""

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, final

from steadystep.errors import MisuseError
from steadystep.records import InputStats, Probe, Signals
from steadystep.stats import is_absurd

_NUMBERS = 1 << 20  # h² of 8,192 ranks add up to less than 2^53


def mark(thing: object) -> tuple[float, float]:
    """What a rank sends about `thing`: h and h²."""
    return mark_number(zlib.crc32(repr(thing).encode()))


def mark_number(number: int) -> tuple[float, float]:
    """The same for a number that stands for the thing already."""
    small = number % _NUMBERS
    return float(small), float(small * small)


def same_on_all_ranks(total: float, squares: float, size: int) -> bool:
    """From the sums of both over `size` ranks.

    >>> left, right = mark("step 3"), mark("step 4")
    >>> same_on_all_ranks(2 * left[0], 2 * left[1], 2)
    True
    >>> same_on_all_ranks(left[0] + right[0], left[1] + right[1], 2)
    False
    """
    return int(squares) * size == int(total) ** 2


METRICS = 32
"""Metrics that are averaged over ranks; more than these are left out."""
EVERYTHING = "the state of all ranks"
"""Stands for all its tensors where none is damaged."""
_BITS = 48  # of the 53 that are exact
_PROBED = ("weight_rms", "update_rms", "second_moments", "surprises", "zero_shares", "dead", "saturated", "row_norms")
_PARTS = (*_PROBED, "logit_bounds")
_INPUTS = ("batches", "mean", "std", "largest", "constant_share", "scale_spread", "finite")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadLayout:
    """What the numbers of a payload stand for; the same on all ranks, or nothing can be agreed."""

    rank: int
    size: int
    names: tuple[str, ...]
    """All parameters of the optimizer."""
    buffers: tuple[str, ...]
    micro_batches: int
    questions: int
    pipelined: bool = False
    """Ranks hold different parameters: each says which of them it has, and whether it has a loss."""
    has_loss: bool = True


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all ranks said together."""

    signals: Signals
    questions: tuple[bool, ...]
    in_step: bool
    """All ranks look at the same step of the same loop."""
    same_settings: bool
    """Learning rates and scales are the same everywhere."""
    same_weights: bool
    """Where replicas are compared at this step: they hold the same bits."""
    probe_fits: bool
    """All ranks hold a probe of the same shape: it can be added up next time."""
    damaged: bool
    """The optimizer's state or a kept object of some rank holds what no training comes to."""
    has_loss: bool
    """At least one rank knows the loss."""

    def check(self, *, rank: int, step: int) -> None:
        """Raise MisuseError when the ranks do not train one model together."""
        if not self.has_loss:
            raise MisuseError(
                "no rank has the loss of this step: on the rank of the last stage call watcher.loss(loss), "
                "torch.stack(losses).mean() after schedule.step(target=..., losses=losses), before optimizer.step()"
            )
        if not self.in_step:
            raise MisuseError(
                f"the ranks are out of sync: rank {rank} is at step {step} and another rank is not, or it received "
                "a different number of micro-batches. Every rank must call step() equally often, also after an "
                "exception"
            )
        if not self.same_settings:
            raise MisuseError(
                "learning rates or loss scales differ between ranks, so their weights would diverge: set the same "
                "values on every rank"
            )


def encode(
    form: PayloadLayout,
    signals: Signals,
    *,
    copies: Mapping[str, float],
    questions: Sequence[bool] = (),
    checksum: int = 0,
    waiting: Probe | None = None,
    probe: Probe | None = None,
) -> list[float]:
    """Return what this rank adds to the sum.

    Args:
        form: what is counted.
        signals: as measured here.
        copies: by parameter, how many ranks hold the same part of its gradient.
        questions: what this rank wants to happen.
        checksum: of its weights, at steps where replicas are compared.
        waiting: a probe that was taken here, of which only the shape is compared now.
        probe: one that all ranks are known to hold: its numbers are appended.
    """
    numbers = [1.0, signals.loss if form.has_loss else 0.0, float(signals.repeatable)]
    numbers += [float(signals.input_finite is False), float(signals.input_finite is True)]
    numbers += [float(bool(signals.state_peaks)), float(bool(damaged(signals)))]
    count = 0 if form.pipelined else len(signals.names)
    numbers += mark((signals.step, len(signals.losses), count, signals.refused_in_a_row))
    numbers += mark((signals.lr, signals.announced_lr, signals.scale, signals.scaled))
    numbers += mark_number(checksum)
    named = sorted(signals.metrics)[:METRICS]
    numbers += mark(named)
    numbers += mark(None if waiting is None else shape_of(waiting))
    numbers += [float(question) for question in questions]
    numbers += _bits(form, not math.isfinite(signals.loss) or signals.input_finite is False)
    losses = signals.losses[: form.micro_batches]
    losses = losses if form.has_loss else (0.0,) * len(losses)
    numbers += [*losses, *[0.0] * (form.micro_batches - len(losses))]
    norms = dict(zip(signals.names, signals.norms, strict=True))
    numbers += [norms[name] * norms[name] / copies[name] if name in norms else 0.0 for name in form.names]
    if form.pipelined:
        numbers += [float(form.has_loss), *(float(name in norms) for name in form.names)]
    peaks = dict(zip(signals.buffers, signals.buffer_peaks, strict=True))
    for name in form.buffers:
        numbers += (float(name in peaks), float(name in signals.bad_buffers), _fourth_power(peaks.get(name, 0.0)))
    numbers += _about_inputs(signals.inputs)
    metrics = [signals.metrics[name] for name in named]
    numbers += [*metrics, *[0.0] * (METRICS - len(metrics))]
    return numbers if probe is None else [*numbers, *_flat(probe)]


def decode(form: PayloadLayout, sums: Sequence[float], signals: Signals, *, probe: Probe | None = None) -> Agreed:
    """What the sums of all payloads mean; `signals` and `probe` are what this rank had put in."""
    size, host = form.size, iter(sums)
    present, loss, repeatable, bad_inputs, good_inputs, looked, spoilt = islice(host, 7)
    marks = [same_on_all_ranks(next(host), next(host), size) for _ in range(5)]
    in_step, same_settings, same_weights, same_metrics, probe_fits = marks
    questions = tuple(question > 0.0 for question in islice(host, form.questions))
    ranks, losses = tuple(_ranks(islice(host, _words(size)), size)), list(islice(host, form.micro_batches))
    squares = dict(zip(form.names, islice(host, len(form.names)), strict=True))
    known, names = _of_stages(form, host) if form.pipelined else (float(size), signals.names)
    norms = {name: math.sqrt(squares[name]) for name in names}
    buffers = {name: tuple(islice(host, 3)) for name in form.buffers}
    peaks = {name: (fourth / seen) ** 0.25 for name, (seen, _, fourth) in buffers.items() if seen}
    inputs = _inputs(next(host), [total / size for total in islice(host, len(_INPUTS))], size)
    metrics = [total / size for total in islice(host, METRICS)]
    return Agreed(
        signals=replace(
            signals,
            loss=loss / (known or math.nan),
            losses=tuple(total / (known or math.nan) for total in losses[: len(signals.losses)]),
            grad_norm=math.hypot(*norms.values()),
            **_named("names", "norms", norms),
            bad_buffers=tuple(name for name, (_, bad, _) in buffers.items() if bad),
            **_named("buffers", "buffer_peaks", peaks),
            **_named("state", "state_peaks", {EVERYTHING: 0.0} if looked else {}),
            repeatable=repeatable == size,
            input_finite=False if bad_inputs else (True if good_inputs else None),
            metrics=dict(zip(sorted(signals.metrics), metrics, strict=False)) if same_metrics else {},
            bad_ranks=ranks,
            batch_rms=None,  # why: each rank has another batch, and what is decided must come from what all know
            inputs=inputs,
            probe=None if probe is None else _unflat(probe, [total / size for total in host]),
        ),
        questions=questions,
        in_step=in_step and present == size,
        same_settings=same_settings,
        same_weights=same_weights,
        probe_fits=probe_fits,
        damaged=spoilt > 0.0,
        has_loss=known > 0.0,
    )


def _named(names: str, numbers: str, known: Mapping[str, float]) -> dict[str, Any]:
    """Two fields of `Signals` that belong together: which tensors, and a number for each."""
    return {names: tuple(known), numbers: tuple(known.values())}


def _of_stages(form: PayloadLayout, host: Iterator[float]) -> tuple[float, tuple[str, ...]]:
    """How many ranks have a loss, and the parameters of which one has a gradient."""
    known, held = next(host), islice(host, len(form.names))
    return known, tuple(name for name, count in zip(form.names, held, strict=True) if count)


def damaged(signals: Signals) -> dict[str, float]:
    """Tensors beside the weights that hold what no training comes to, on this rank."""
    return {name: peak for name, peak in zip(signals.state, signals.state_peaks, strict=True) if is_absurd(peak)}


def shape_of(probe: Probe) -> tuple[object, ...]:
    """What must be the same on all ranks for two probes to be added up."""
    lengths = tuple(len(getattr(probe, part)) for part in _PARTS)
    return probe.step, probe.names, probe.modules, probe.tables, probe.attentions, lengths


def _flat(probe: Probe) -> list[float]:
    return [number for part in _PARTS for number in getattr(probe, part)]


def _unflat(probe: Probe, means: Sequence[float]) -> Probe:
    host = iter(means)
    parts: dict[str, Any] = {part: tuple(islice(host, len(getattr(probe, part)))) for part in _PARTS}
    return replace(probe, **parts)


def _about_inputs(stats: InputStats | None) -> list[float]:
    if stats is None:
        return [0.0] * (1 + len(_INPUTS))
    return [1.0, *(float(getattr(stats, part)) for part in _INPUTS)]


def _inputs(known: float, means: Sequence[float], size: int) -> InputStats | None:
    if known != size:
        return None
    parts: dict[str, Any] = dict(zip(_INPUTS, means, strict=True))
    return InputStats(**parts | {"batches": round(parts["batches"]), "finite": parts["finite"] == 1.0})


def _fourth_power(peak: float) -> float:
    square = peak * peak  # why not **: Python's raises where this becomes infinite
    return square * square


def _words(size: int) -> int:
    return -(-size // _BITS)


def _bits(form: PayloadLayout, flag: bool) -> list[float]:
    words = [0.0] * _words(form.size)
    if flag:
        words[form.rank // _BITS] = float(1 << form.rank % _BITS)
    return words


def _ranks(words: Iterator[float], size: int) -> Iterator[int]:
    for place, word in enumerate(words):
        bits = int(word)
        yield from (place * _BITS + i for i in range(min(_BITS, size - place * _BITS)) if bits >> i & 1)
