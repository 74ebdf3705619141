"""What an examination tries: the run with one thing repaired."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep.diagnosis.causes import Cause, Fault
from steadystep.examination.parameters import hold_too, restart, restart_plainly, thaw
from steadystep.examination.passes import Pass, Scaling, fits, joined_batches, mixed, record_losses
from steadystep.examination.workbench import Variation, Workbench

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_NORMS = nn.modules.batchnorm._BatchNorm
_USUAL_FACTORS, _USUAL_RATE = 1e3, 0.1
_UNEVEN = 0.02  # of the largest learning rate
_LARGE_BATCH, _TINY_BATCH, _USUAL_BATCH = 8, 4, 64


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """One thing to try, and what is wrong if it helps."""

    name: str
    what: str
    cause: Cause
    advice: str
    variation: Variation
    fault: str = ""
    fresh: bool = False
    """From newly drawn weights, beside a trial from newly drawn weights without the repair."""
    particular: bool = False
    """Undoes one setting or one property of the data: tried also where the run learns, but slowly."""
    eases: bool = False
    """Lowers the loss of any weights: compared with the present ones in the same conditions."""
    rescaled: bool = False
    """Losses are in other units, so what counts is which share of the first loss is gone."""


def repairs(bench: Workbench, seen: Pass, left_out: Sequence[str], frozen: Sequence[str] = ()) -> Iterator[Repair]:
    """What can be tried with this job, the most particular first.

    Args:
        bench: where it will be tried.
        seen: one pass.
        left_out: trainable parameters that get a gradient and are not in the optimizer.
        frozen: parameters with `requires_grad` off.
    """
    yield from (*_of_the_update(bench, left_out), *_of_the_model(bench))
    yield from _thawed(frozen) if frozen else ()
    yield from _terms(bench, seen)
    yield from _data(bench, seen)
    larger = _larger_batches(bench, seen.num_samples)
    yield from (larger,) if (tiny := seen.num_samples <= _TINY_BATCH) else ()
    yield from slower()
    yield from faster(max(float(group["lr"]) for group in bench.optimizer.param_groups))  # sync: examined
    yield _PLAIN_INIT
    yield from () if tiny else (larger,)


def slower() -> Iterator[Repair]:
    """Fractions of the learning rate."""
    for factor in (0.1, 0.01):
        yield Repair(
            name=f"lr/{round(1 / factor)}",
            what=f"with new weights and the learning rate divided by {round(1 / factor)}",
            cause=Cause.LEARNING_RATE_TOO_HIGH,
            advice=f"divide the learning rate by {round(1 / factor)} (tried, learns)",
            variation=Variation(lr_mult=factor),
            fresh=True,
        )


def faster(lr: float = 1.0, factors: Sequence[float] = (10.0, 100.0, 1e3, 1e4, 1e5)) -> Iterator[Repair]:
    """Multiples of a learning rate, up to 1000 or to where it is usual."""
    for factor in factors:
        if factor > _USUAL_FACTORS and factor * lr > _USUAL_RATE:
            break
        yield Repair(
            name=f"lr*{factor:.0f}",
            what=f"at {factor:.0f} times the learning rate",
            cause=Cause.LEARNING_RATE_TOO_LOW,
            advice=f"multiply the learning rate by {factor:.0f} (tried, learns)",
            variation=Variation(lr_mult=factor),
        )


def _of_the_update(bench: Workbench, left_out: Sequence[str]) -> Iterator[Repair]:
    if left_out:
        yield Repair(
            name="all-parameters",
            what="with all parameters in the optimizer",
            cause=Cause.NO_LEARNING,
            fault=Fault.WRONG_OPTIMIZER_PARAMS,
            advice="build the optimizer from model.parameters(), or add a group for these (tried, learns)",
            variation=Variation(prepare=lambda model, optimizer: hold_too(model, optimizer, left_out)),
            particular=True,
        )
    rates = [float(group["lr"]) for group in bench.optimizer.param_groups]  # sync: examined
    yield from (_EVEN_RATES,) if min(rates) < _UNEVEN * max(rates) else ()
    if bench.max_grad_norm is not None:
        yield Repair(
            name="no-clipping",
            what="without gradient clipping",
            cause=Cause.CLIPPING_TOO_TIGHT,
            advice="raise max_grad_norm (tried without clipping, learns)",
            variation=Variation(clip=False),
            particular=True,
        )
    if bench.plain is not None:
        yield Repair(
            name="fp32",
            what="in float32",
            cause=Cause.GRADIENT_UNDERFLOW,
            fault=Fault.PRECISION,
            advice="train in float32, or scale the loss so that small gradients do not round to zero (tried, learns)",
            variation=Variation(loss=bench.plain),
            particular=True,
        )


def _of_the_model(bench: Workbench) -> Iterator[Repair]:
    if not bench.model.training:
        yield Repair(
            name="train-mode",
            what="with new weights in training mode",
            cause=Cause.NO_LEARNING,
            fault=Fault.EVAL_MODE,
            advice="call model.train() before training and after every evaluation (tried, learns)",
            variation=Variation(prepare=lambda model, _: _train_mode(model)),
            fresh=True,
            particular=True,
        )
    if any(group.get("weight_decay") for group in bench.optimizer.param_groups):
        yield Repair(
            name="no-decay",
            what="with new weights and no weight decay",
            cause=Cause.NO_LEARNING,
            fault=Fault.REGULARISATION_TOO_STRONG,
            advice="lower the weight decay (tried without, learns)",
            variation=Variation(prepare=_without_decay),
            fresh=True,
            particular=True,
        )
    if any(isinstance(module, _DROPOUTS) and module.p > 0 and module.training for module in bench.model.modules()):
        no_dropout = Repair(
            name="no-dropout",
            what="without dropout",
            cause=Cause.NO_LEARNING,
            fault=Fault.REGULARISATION_TOO_STRONG,
            advice="lower the dropout probability; p is the share that is dropped (tried without, learns)",
            variation=Variation(prepare=_without_dropout),
            particular=True,
            eases=True,
        )
        yield no_dropout
        yield replace(no_dropout, name="no-dropout-fresh", what="with new weights and no dropout", fresh=True)


_PLAIN_INIT = Repair(
    name="plain-init",
    what="with weights drawn at 1 / sqrt(inputs)",
    cause=Cause.POOR_INITIALISATION,
    advice="use torch's default initialization, or steadystep.init (tried with a plain one, learns)",
    variation=Variation(prepare=restart_plainly),
)


def _evenly(_: nn.Module, optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = max(float(each["lr"]) for each in optimizer.param_groups)  # sync: examined


_EVEN_RATES = Repair(
    name="even-rates",
    what="with the largest learning rate for all parameters",
    cause=Cause.LEARNING_RATE_TOO_LOW,
    advice="give all parameters rates of the same order (tried, learns)",
    variation=Variation(prepare=_evenly),
    particular=True,
)


def _thawed(frozen: Sequence[str]) -> Iterator[Repair]:
    yield Repair(
        name="all-trainable",
        what="with all parameters trainable",
        cause=Cause.NO_LEARNING,
        fault=Fault.FROZEN_PARAMETERS,
        advice="set requires_grad = True for what should be trained, and give it to the optimizer (tried, learns)",
        variation=Variation(prepare=lambda model, optimizer: thaw(model, optimizer, frozen)),
        particular=True,
    )


def _train_mode(model: nn.Module) -> None:
    model.train()  # `set_aside` puts the modes back


def _without_decay(_: nn.Module, optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] = 0.0


def _without_dropout(model: nn.Module, _: Optimizer) -> None:
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.eval()  # why not p = 0: modes are put back by `set_aside`, attributes are not


def _data(bench: Workbench, seen: Pass) -> Iterator[Repair]:
    scaling = Scaling.of(bench.batches, seen.unchanged)
    if scaling is not None:
        yield Repair(
            name="scaled-inputs",
            what="with new weights and standardized inputs",
            cause=Cause.UNSCALED_DATA,
            advice="standardize the inputs to mean 0 and standard deviation 1 (tried, learns)",
            variation=Variation(change=lambda batch: seen.with_inputs(batch, scaling.apply)),
            fresh=True,
            particular=True,
        )
    targets = Scaling.of(bench.batches, seen.targets, by_feature=False)
    if targets is not None:
        yield Repair(
            name="scaled-targets",
            what="with new weights and standardized targets",
            cause=Cause.UNSCALED_DATA,
            fault=Fault.UNSCALED_TARGETS,
            advice="standardize the targets to mean 0 and standard deviation 1 (tried, learns)",
            variation=Variation(change=lambda batch: seen.with_targets(batch, targets.apply)),
            fresh=True,
            rescaled=True,
        )
    dealt = mixed(bench.batches)
    if dealt is not None:
        yield Repair(
            name="mixed-batches",
            what="with samples exchanged between batches",
            cause=Cause.NO_LEARNING,
            fault=Fault.UNSHUFFLED_DATA,
            advice="shuffle the data (tried with samples drawn from all batches, learns)",
            variation=Variation(batches=dealt),
        )


def _terms(bench: Workbench, seen: Pass) -> Iterator[Repair]:
    """The first loss function that is called, without the other terms of the loss."""
    if not seen.calls or not _has_more(bench):
        return

    def first_term(batch: Any) -> Tensor:
        recorder, loss = record_losses(bench.loss, batch)
        return recorder.results[0].reshape(()) if recorder.results else loss

    yield Repair(
        name="first-term",
        what=f"with new weights and {seen.calls[0].name} as the only term",
        cause=Cause.NO_LEARNING,
        fault=Fault.REGULARISATION_TOO_STRONG,
        advice="give the other terms of the loss a smaller weight, or average all of them over the same things",
        variation=Variation(loss=first_term),
        fresh=True,
        rescaled=True,
    )


def _has_more(bench: Workbench) -> bool:
    """Whether the loss is more than its first term, with newly drawn weights: a penalty is small where it has won."""
    with bench.set_aside(), torch.no_grad():
        restart(bench.model, bench.optimizer)
        try:
            recorder, loss = record_losses(bench.loss, bench.batches[0])
        except RuntimeError:  # why: a loss that takes gradients itself
            return False
    first, whole = float(recorder.results[0]) if recorder.results else math.nan, float(loss)  # sync: once
    return first > 0.0 and abs(first - whole) > 0.02 * abs(whole)


def _larger_batches(bench: Workbench, size: int) -> Repair:
    times = max(_LARGE_BATCH, _USUAL_BATCH // max(size, 1))
    joined = joined_batches(bench.batches, times)
    if joined and not fits(bench, joined[0]):
        joined = None
    times = min(times, len(bench.batches)) if joined else times
    return Repair(
        name="large-batches",
        what=f"with new weights and batches {times} times as large",
        cause=Cause.BATCH_SIZE_UNFIT,
        advice=f"use larger batches or accumulate gradients over {times} (tried, learns)",
        variation=Variation(batches=joined) if joined else Variation(per_update=times),
        fresh=True,
        particular=size < _TINY_BATCH and any(isinstance(m, _NORMS) and m.training for m in bench.model.modules()),
    )
