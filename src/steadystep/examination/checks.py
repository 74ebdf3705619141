"""Mistakes that a few passes show without a trial: each check gives a diagnosis with its evidence, or nothing."""

import math
from collections.abc import Callable, Container, Iterator

import torch
from torch import Tensor

from steadystep._utils import Attempts
from steadystep._utils.tree import tensors_in
from steadystep.diagnosis.causes import Cause, Fault
from steadystep.diagnosis.facts import names
from steadystep.examination.observation import CLASSES, Observation, targets_of
from steadystep.examination.output_checks import OUTPUT_CHECKS, no_learning, softmax_axis
from steadystep.examination.passes import links, num_rows, over_batches
from steadystep.records import Diagnosis

_MOST, _MANY = 0.9, 0.3
_SOON = 30  # steps of a schedule
_ROUNDED, _NOISY = 0.5, 0.05
Check = Callable[[Observation], Diagnosis | None]


def faults_of(observation: Observation, attempt: Attempts) -> Iterator[Diagnosis]:
    """Every mistake that shows, the surest first."""
    for check in _CHECKS:
        found = attempt(None, check, observation)
        if found is not None:
            yield found


def _non_finite(o: Observation) -> Diagnosis | None:
    broken = [number for number, seen in enumerate(o.passes) if not math.isfinite(seen.loss)]
    bad = [name for name, norm in o.parameters.norms.items() if not math.isfinite(norm)]
    if not broken and not bad:
        return None
    inputs = [n for n, t in tensors_in(o.batches[:8]) if t.is_floating_point() and not bool(t.isfinite().all())]
    what = f"the loss of {len(broken)} of {len(o.passes)} batches is not finite"
    if inputs:
        advice = "remove NaN and infinity from the data"
        return Diagnosis(
            cause=Cause.NON_FINITE_INPUT, evidence=f"{what}; so are inputs ({names(inputs)})", advice=advice
        )
    if broken:
        advice = "look for log(0), division by 0 or an overflow on the way to the loss; add an epsilon or a clamp"
        return Diagnosis(cause=Cause.NON_FINITE_LOSS, evidence=what, advice=advice)
    advice = "look for sqrt(0), norm of a zero vector or where() around a division: their gradient is infinite"
    what = f"the loss is finite and the gradient of {names(bad)} is not"
    return Diagnosis(cause=Cause.NON_FINITE_GRADIENT, evidence=what, advice=advice)


def _no_gradient_at_all(o: Observation) -> Diagnosis | None:
    p = o.parameters
    if p.trainable and (any(p.norms.values()) or o.reached_fresh):
        return None
    if not p.trainable:
        return Diagnosis(
            cause=Cause.ZERO_GRADIENT,
            fault=Fault.FROZEN_PARAMETERS,
            evidence="every parameter is frozen (requires_grad is False)",
            advice="set requires_grad = True for what should be trained",
        )
    zeros = [name for name, size in p.sizes.items() if size == 0.0]
    if 2 * len(zeros) > len(p.sizes):
        return Diagnosis(
            cause=Cause.POOR_INITIALISATION,
            evidence=f"no parameter gets a gradient, and {names(zeros)} are all zero",
            advice="draw weights at random: zeros behind zeros cannot learn",
        )
    return Diagnosis(
        cause=Cause.ZERO_GRADIENT,
        evidence="no parameter gets a gradient from the loss",
        advice="look for detach(), argmax, .item(), torch.no_grad() or a constant output between weights and loss",
    )


def _other_weights(o: Observation) -> Diagnosis | None:
    p = o.parameters
    if p.strangers and p.strangers >= _MANY * p.held:
        return no_learning(
            Fault.WRONG_OPTIMIZER_PARAMS,
            f"{p.strangers} of {p.held} tensors in the optimizer do not belong to this model, and the loss does not "
            "depend on them",
            "build the optimizer from model.parameters() after the model is complete, and build the model once",
        )
    if p.untrained_heads and not o.is_adversarial:
        return no_learning(
            Fault.WRONG_OPTIMIZER_PARAMS,
            f"the loss is computed from {names(p.untrained_heads)}, which are in no optimizer",
            "build the optimizer from model.parameters() after the model is complete, and check its groups",
        )
    if p.outside_model:
        return no_learning(
            Fault.FROZEN_PARAMETERS,
            f"the loss depends on {p.outside_model} trainable tensors that the model keeps in a plain container, where "
            "no optimizer finds them",
            "register layers in an nn.ModuleList or nn.ModuleDict instead of a plain list or dict",
        )
    return None


def _no_rate(o: Observation) -> Diagnosis | None:
    still = o.parameters.rate_zero
    if o.rates is None and len(still) >= _MOST * len(o.parameters.sizes):
        if o.parameters.scheduled:  # a warmup may begin at 0, so the future of the schedule has to tell
            return None
        advice = "set a learning rate above 0: look for an integer division or a multiplication by 0"
        return Diagnosis(cause=Cause.LEARNING_RATE_TOO_LOW, evidence="the learning rate is 0", advice=advice)
    if still and len(still) < _MOST * len(o.parameters.sizes):
        return Diagnosis(
            cause=Cause.ZERO_GRADIENT,
            fault=Fault.FROZEN_PARAMETERS,
            evidence=f"the learning rate of {names(still)} is 0",
            advice="give that parameter group a learning rate, or freeze it with requires_grad = False",
        )
    if not o.rates or not max(o.rates) > 0:
        what = (
            ""
            if o.rates is None
            else f"the learning rate is 0, and is so in the next {len(o.rates)} steps of the schedule"
        )
    elif len(o.rates) > _SOON and o.rates[0] == max(o.rates) and o.rates[_SOON] < 0.01 * o.rates[0] < o.rates[0]:
        what = f"the schedule takes the learning rate from {o.rates[0]:.3g} to {o.rates[_SOON]:.3g} in {_SOON} steps"
    else:
        what = ""
    if not what:
        return None
    advice = "check the schedule's arguments: steps or epochs, integer division, a factor applied again and again"
    return Diagnosis(cause=Cause.SCHEDULE_ERROR, evidence=what, advice=advice)


def partly_reached(o: Observation, unreached: Container[str]) -> Diagnosis | None:
    """Parameters that had no gradient at first and have none after a trial."""
    every = o.parameters.sizes
    still = [name for name in o.parameters.no_gradient if name in unreached]
    zeros = [name for name in still if every[name] == 0.0]
    if len(still) < max(_MANY * len(every), 1):
        return None
    if len(zeros) > 0.9 * len(still):
        return Diagnosis(
            cause=Cause.POOR_INITIALISATION,
            evidence=f"{names(zeros)} are all zero and get no gradient, as do {names(still)}",
            advice="draw at least one of two factors at random: zeros behind zeros cannot learn",
        )
    return Diagnosis(
        cause=Cause.ZERO_GRADIENT,
        fault=Fault.FROZEN_PARAMETERS,
        evidence=f"{len(still)} of {len(every)} trainable tensors get no gradient in any batch ({names(still)})",
        advice="look for detach(), .item(), no_grad(), an unused branch or a dead activation between them and the loss",
    )


def _half_precision(o: Observation) -> Diagnosis | None:
    p = o.parameters
    half = p.half_precision if p.rounds_eps or p.rounded > _ROUNDED or not o.is_finite else ()
    if o.rounding is not None and o.rounding > _NOISY:
        return Diagnosis(
            cause=Cause.GRADIENT_UNDERFLOW,
            fault=Fault.PRECISION,
            evidence=f"in double precision the loss of a batch is {o.rounding:.0%} off: its digits cancel out",
            advice="look for differences of nearly equal numbers (a tiny step, E[x²] - E[x]²), or use float64",
        )
    if not half and p.rounded > _ROUNDED:
        return Diagnosis(
            cause=Cause.GRADIENT_UNDERFLOW,
            fault=Fault.PRECISION,
            evidence=f"an update leaves {o.parameters.rounded:.0%} of the 16-bit weights with a gradient unchanged",
            advice="keep the weights in float32 and use torch.autocast: small updates are rounded away",
        )
    if not half:
        return None
    return Diagnosis(
        cause=Cause.GRADIENT_UNDERFLOW,
        fault=Fault.PRECISION,
        evidence=f"{len(half)} of {len(o.parameters.sizes)} weights are float16 ({names(half)}): small updates, and "
        "Adam's eps, round to zero",
        advice="keep the weights in float32 and use torch.autocast with a GradScaler, or bfloat16",
    )


def _one_target(o: Observation) -> Diagnosis | None:
    targets = targets_of(o)
    if targets is None or targets.numel() < 8 or o.is_solved:
        return None
    call = o.calls[0] if o.calls else None
    ignored = call.options.get("ignore_index", -100) if call is not None and call.name in CLASSES else -100
    value = targets.flatten()[0]
    if not bool((targets == value).all()):  # sync: examined
        return None
    if o.is_adversarial:
        return None
    if not targets.is_floating_point() and int(value) == ignored:  # sync: examined
        return Diagnosis(
            cause=Cause.ZERO_GRADIENT,
            fault=Fault.ALL_IGNORED_TARGETS,
            evidence=f"every target is {ignored}, the label that the loss ignores",
            advice="check the mask that sets labels to the ignored value: it covers everything",
        )
    reward = next(
        (name for seen in o.passes[:1] for name in seen.targets if "reward" in name or "advantage" in name), ""
    )
    if reward:
        return Diagnosis(
            cause=Cause.FLAT_REWARD,
            evidence=f"{reward} is the same for all samples",
            advice="check the reward function",
        )
    return no_learning(
        Fault.CONSTANT_TARGETS,
        f"all {targets.numel()} targets are {float(value):.4g}",  # sync: examined
        "check how targets are made: there is nothing to learn from one value",
    )


def _one_class_at_a_time(o: Observation) -> Diagnosis | None:
    groups = []
    for seen in o.passes:
        fits = [
            t
            for t in seen.targets.values()
            if num_rows(t) == seen.num_samples and t.dim() == 1 and not t.is_floating_point()
        ]
        if not fits or num_rows(fits[-1]) < 4:
            return None
        groups.append(torch.unique(fits[-1]).tolist())  # sync: examined
    single = sum(len(group) == 1 for group in groups)
    if len(groups) < 4 or single < _MOST * len(groups) or len({group[0] for group in groups}) == 1:
        return None
    return no_learning(
        Fault.UNSHUFFLED_DATA,
        f"{single} of {len(groups)} batches hold a single class each",
        "shuffle the data (shuffle=True in the DataLoader): each batch pulls the model to its own class",
    )


def _constant_inputs(o: Observation) -> Diagnosis | None:
    flat: list[str] = []
    if o.is_solved:
        return None
    features = {name: tensor for name, tensor in o.passes[0].inputs.items() if not links(tensor)}
    for name in features:
        values = over_batches(o.passes, lambda seen, name=name: seen.inputs.get(name))  # type: ignore[misc]
        if values is not None and num_rows(values) > 4 and bool((values == values[:1]).all()):  # sync: examined
            flat.append(name or "the input")
    if not flat or len(flat) < len(features):
        return None
    return no_learning(
        Fault.CONSTANT_INPUTS,
        f"{names(flat)}: the same for every sample of {len(o.passes)} batches",
        "check the preprocessing: a hash, a clip, a cast to int or a wrong column makes all inputs equal",
    )


def _are_places(tensor: Tensor) -> bool:
    """Coordinates: a network that is fitted to one image or one domain sees all of it in every step."""
    return tensor.is_floating_point() and tensor.dim() == 2 and tensor.shape[1] < 4


def _same_batch(o: Observation) -> Diagnosis | None:
    first = [t for _, t in tensors_in(o.batches[0])]
    if len(o.batches) < 3 or not o.rounds or o.is_solved:
        return None
    # why a power of two: batches that are the whole dataset are the same as well, and are rarely so large to the sample
    size = num_rows(first[0]) if first else 0
    if size < 4 or size & (size - 1) or o.is_graph or _are_places(first[0]):
        return None
    return Diagnosis(
        cause=Cause.REPEATED_BATCH,
        evidence=f"all {len(o.batches)} batches are the same",
        advice="iterate over the loader: next(iter(loader)) inside the loop begins it anew each time",
    )


_CHECKS: tuple[Check, ...] = (
    _one_class_at_a_time,
    _one_target,
    _non_finite,
    _other_weights,
    _half_precision,
    softmax_axis,
    _no_gradient_at_all,
    _no_rate,
    _constant_inputs,
    _same_batch,
    *OUTPUT_CHECKS,
)
