"""Mistakes that a few passes show without a trial: each check gives a diagnosis with its evidence, or nothing."""

import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from steadystep._utils.tree import tensors_in
from steadystep.diagnosis.causes import Cause, Fault
from steadystep.diagnosis.facts import names
from steadystep.examination.loss_calls import LossCall, class_dim, is_distribution, is_log_distribution
from steadystep.examination.observations import Parameters, Pass, over_batches, rows
from steadystep.records import Diagnosis

_NEIGHBORS = 0.05  # of the spread of the outputs; rounding leaves 1e-6
_SAME = 1e-6
_MOST, _MANY = 0.9, 0.3
_SOON = 30  # steps of a schedule
_OWN_TARGET = 0.3  # of the change, in the gradient of the sample's own output
_LATER = 1e-3  # of the spread of the outputs
_OUT_OF_REACH = 0.2  # of the targets
_CLASSES = ("cross_entropy", "nll_loss")
_DISTANCES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_RANGES = {"sigmoid": (0.0, 1.0), "softmax": (0.0, 1.0), "tanh": (-1.0, 1.0), "relu": (0.0, math.inf)}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """All that was seen without a trial."""

    passes: Sequence[Pass]
    parameters: Parameters
    batches: Sequence[Any]
    rates: Sequence[float] | None
    """The next learning rates of the schedule; None where there is none, or it does not go by steps."""
    on_input: float | None
    """By how much outputs change when samples are exchanged."""
    on_input_fresh: float | None
    """The same with newly drawn weights."""
    spread: float | None
    """The mean of 1 - cosine between the outputs of two samples."""
    spread_fresh: float | None
    on_neighbors: float | None
    on_later: float | None
    own_target: float | None
    certainty: bool
    """A policy is rewarded for low entropy."""
    reached_fresh: bool
    """With newly drawn weights there is a gradient."""
    dead: dict[str, float]
    saturated: dict[str, float]

    @property
    def is_graph(self) -> bool:
        """Samples are meant to depend on each other: the batch has edges or an adjacency matrix."""
        return any(_links(tensor) for _, tensor in tensors_in(self.batches[0]))

    @property
    def is_adversarial(self) -> bool:
        """Several networks, one called more than once, and no targets but constants: the level says nothing."""
        parts = {id(m): m for m in self.passes[0].modules if any(p.requires_grad for p in m.parameters())}
        targets = [c.target for c in self.calls if c.target is not None and c.target.numel() > 1]
        flat = [bool((t == t.flatten()[0]).all()) for t in targets]  # sync: examined
        if not all(flat):
            return False
        return len(flat) > 1 or (len(parts) > 1 and len(self.passes[0].modules) > len(parts))

    @property
    def calls(self) -> list[LossCall]:
        """Of the first pass."""
        return self.passes[0].recorder.calls


def _links(tensor: Tensor) -> bool:
    """Whether it says which samples belong together: sparse, a list of edges, or an adjacency matrix."""
    if tensor.layout is not torch.strided:
        return True
    if tensor.dim() != 2 or tensor.shape[1] <= 4:
        return False
    if tensor.shape[0] == tensor.shape[1]:
        sums = tensor.sum(1)
        return bool(
            (tensor == tensor.T).all() or ((tensor >= 0).all() and (sums - 1).abs().max() < 1e-3)
        )  # sync: examined
    return tensor.shape[0] == 2 and tensor.dtype == torch.int64


Check = Callable[[Observation], Diagnosis | None]


def faults_of(observation: Observation) -> Iterator[Diagnosis]:
    """Every mistake that shows, the surest first."""
    for check in _CHECKS:
        found = check(observation)
        if found is not None:
            yield found


def trivial_loss(o: Observation) -> float | None:
    """The loss of the best constant prediction; None where the loss is not one plain loss function of torch."""
    if (
        len(o.calls) != 1
        or o.calls[0].value is None
        or not math.isclose(o.calls[0].value, o.passes[0].loss, rel_tol=1e-3)
    ):
        return None
    call, targets = o.calls[0], _targets(o)
    if targets is None or call.weighted or call.options.get("reduction", "mean") != "mean":
        return None
    if call.name in _CLASSES and not targets.is_floating_point():
        kept = targets[targets != call.options.get("ignore_index", -100)]
        shares = kept.unique(return_counts=True)[1].double() / max(kept.numel(), 1)
        smoothing, classes = float(call.options.get("label_smoothing", 0.0)), call.given.shape[class_dim(call.given)]
        missing = torch.zeros(max(classes - len(shares), 0), dtype=shares.dtype, device=shares.device)
        shares = torch.cat([shares, missing]) * (1.0 - smoothing) + smoothing / classes
        shares = shares[shares > 0]
        return float(-(shares * shares.log()).sum())  # sync: examined
    if call.name.startswith("binary_cross_entropy") and targets.is_floating_point():
        p = targets.double().reshape(rows(targets), -1).mean(0).clamp(1e-12, 1 - 1e-12)
        return float(-(p * p.log() + (1 - p) * (1 - p).log()).mean())  # sync: examined
    if call.name == "mse_loss":
        return float(targets.double().var(0, unbiased=False).mean())  # sync: examined
    if call.name == "l1_loss":
        return float((targets - targets.median(0).values).abs().double().mean())  # sync: examined
    return None


def _no_learning(fault: Fault, evidence: str, advice: str) -> Diagnosis:
    return Diagnosis(cause=Cause.NO_LEARNING, fault=fault, evidence=evidence, advice=advice)


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
        return _no_learning(
            Fault.WRONG_OPTIMIZER_PARAMS,
            f"{p.strangers} of {p.held} tensors in the optimizer do not belong to this model, and the loss does not "
            "depend on them",
            "build the optimizer from model.parameters() after the model is complete, and build the model once",
        )
    if p.outside_model:
        return _no_learning(
            Fault.FROZEN_PARAMETERS,
            f"the loss depends on {p.outside_model} trainable tensors that are neither in the model nor in the optimizer",
            "register layers with nn.ModuleList or nn.ModuleDict, not in a plain list or dict, and tensors as nn.Parameter",
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
    elif o.rates[0] == max(o.rates) and o.rates[_SOON] < 0.01 * o.rates[0] < o.rates[0]:
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
        advice="follow them to the loss: detach(), .item(), no_grad(), an unused branch or a dead activation is between",
    )


def _half_precision(o: Observation) -> Diagnosis | None:
    half = o.parameters.half_precision
    if not half:
        return None
    return Diagnosis(
        cause=Cause.GRADIENT_UNDERFLOW,
        fault=Fault.PRECISION,
        evidence=f"{len(half)} of {len(o.parameters.sizes)} weights are float16 ({names(half)}): small updates and Adam's "
        "eps round to zero",
        advice="keep the weights in float32 and use torch.autocast with a GradScaler, or bfloat16",
    )


def _targets(o: Observation) -> Tensor | None:
    """Targets of all passes, as the loss function got them; those of the batch where no loss function was seen."""

    def from_call(seen: Pass) -> Tensor | None:
        return seen.recorder.calls[0].target if seen.recorder.calls else None

    def from_batch(seen: Pass) -> Tensor | None:
        fits = [t for t in seen.targets.values() if rows(t) == seen.num_samples]
        return fits[-1] if fits else None

    found = over_batches(o.passes, from_call)
    return over_batches(o.passes, from_batch) if found is None else found


def _one_target(o: Observation) -> Diagnosis | None:
    targets = _targets(o)
    if targets is None or targets.numel() < 8:
        return None
    call = o.calls[0] if o.calls else None
    ignored = call.options.get("ignore_index", -100) if call is not None and call.name in _CLASSES else -100
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
    return _no_learning(
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
            if rows(t) == seen.num_samples and t.dim() == 1 and not t.is_floating_point()
        ]
        if not fits or rows(fits[-1]) < 4:
            return None
        groups.append(fits[-1].unique().tolist())  # sync: examined
    single = sum(len(group) == 1 for group in groups)
    if len(groups) < 4 or single < _MOST * len(groups) or len({group[0] for group in groups}) == 1:
        return None
    return _no_learning(
        Fault.UNSHUFFLED_DATA,
        f"{single} of {len(groups)} batches hold a single class each",
        "shuffle the data (shuffle=True in the DataLoader): each batch pulls the model to its own class",
    )


def _constant_inputs(o: Observation) -> Diagnosis | None:
    flat = []
    for name in o.passes[0].inputs:
        values = over_batches(o.passes, lambda seen, name=name: seen.inputs.get(name))  # type: ignore[misc]
        if values is not None and rows(values) > 4 and bool((values == values[:1]).all()):  # sync: examined
            flat.append(name or "the input")
    if not flat or len(flat) < len(o.passes[0].inputs):
        return None
    return _no_learning(
        Fault.CONSTANT_INPUTS,
        f"{names(flat)}: the same for every sample of {len(o.passes)} batches",
        "check the preprocessing: a hash, a clip, a cast to int or a wrong column makes all inputs equal",
    )


def _same_batch(o: Observation) -> Diagnosis | None:
    if len(o.batches) < 3:
        return None
    first = [t for _, t in tensors_in(o.batches[0])]
    others = [[t for _, t in tensors_in(batch)] for batch in o.batches[1:]]
    # why a power of two: batches that are the whole dataset are the same as well, and are rarely so large to the sample
    size = rows(first[0]) if first else 0
    if size < 4 or size & (size - 1) or o.is_graph:
        return None
    if not all(len(a) == len(first) and all(map(_equal, a, first)) for a in others):
        return None
    return Diagnosis(
        cause=Cause.REPEATED_BATCH,
        evidence=f"all {len(o.batches)} batches are the same",
        advice="iterate over the loader: next(iter(loader)) inside the loop begins it anew each time",
    )


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _activation_before_loss(o: Observation) -> Diagnosis | None:
    """Loss functions that apply an activation themselves, or need another one."""
    for call in o.calls:
        made, dim = call.origin, class_dim(call.given)
        wrong = ""
        if call.name == "cross_entropy" and (made is not None and made.name in ("softmax", "sigmoid")):
            wrong = f"cross_entropy applies a softmax to what a {made.name} has made"
        elif call.name == "cross_entropy" and is_distribution(call.given, dim) and call.given.shape[dim] > 2:
            wrong = "cross_entropy applies a softmax to what are probabilities already"
        elif (
            call.name == "binary_cross_entropy_with_logits" and made is not None and made.name in ("sigmoid", "softmax")
        ):
            wrong = f"binary_cross_entropy_with_logits applies a sigmoid to what a {made.name} has made"
        elif call.name == "binary_cross_entropy" and made is not None and made.before is not None:
            if made.before.name in ("sigmoid", "softmax", "relu", "tanh"):
                wrong = f"binary_cross_entropy gets the {made.name} of a {made.before.name}"
        elif call.name in ("nll_loss", "kl_div"):
            dim = dim if call.name == "nll_loss" else call.given.dim() - 1
            if not is_log_distribution(call.given, dim):
                kind = "probabilities" if is_distribution(call.given, dim) else "numbers"
                wrong = f"{call.name} wants log-probabilities and gets {kind} that are none"
        if wrong:
            return _no_learning(
                Fault.WRONG_LOSS,
                f"{wrong}: it cannot fall far below {_shown(call)}",
                "pass what the loss function expects: logits to cross_entropy and ..._with_logits, log_softmax to nll_loss "
                "and kl_div, a single sigmoid to binary_cross_entropy",
            )
    return None


def _shown(call: LossCall) -> str:
    return "its present value" if call.value is None else f"{call.value:.4g}"


def _softmax_axis(o: Observation) -> Diagnosis | None:
    for call in o.calls:
        made = call.origin
        if made is None or "softmax" not in made.name or made.dim is None:
            continue
        size = made.shape[made.dim]
        if size == 1:
            return _no_learning(
                Fault.SOFTMAX_AXIS,
                f"a {made.name} over a single unit gives the same whatever the input (shape {made.shape}, dim {made.dim})",
                "use a sigmoid for one unit, or two units with a softmax",
            )
        over_batch = made.dim == 0 and len(made.shape) > 1 and size != made.shape[-1]
        over_other = call.name in _CLASSES and made.dim not in (len(made.shape) - 1, 1)
        if over_batch or over_other:
            return _no_learning(
                Fault.SOFTMAX_AXIS,
                f"a {made.name} over dimension {made.dim} of a tensor of shape {made.shape}: over samples, not over classes",
                f"use dim={len(made.shape) - 1}, the dimension of the classes",
            )
    return None


def _broadcast(o: Observation) -> Diagnosis | None:
    size = o.passes[0].num_samples
    pairs = [
        (tuple(c.given.shape), tuple(c.target.shape)) for c in o.calls if c.name in _DISTANCES and c.target is not None
    ]
    for left, right in (*pairs, *o.passes[0].recorder.differences):
        if size > 1 and {left, right} == {(size, 1), (size,)}:
            return _no_learning(
                Fault.WRONG_LOSS,
                f"outputs and targets of shapes {left} and {right}: broadcasting compares every output with every target, "
                "and their mean is the best answer",
                "squeeze the outputs or unsqueeze the targets, so that both have the same shape",
            )
    return None


def _out_of_reach(o: Observation) -> Diagnosis | None:
    targets = _targets(o)
    for call in o.calls[:1]:
        made = call.origin
        if call.name not in _DISTANCES or made is None or made.name not in _RANGES or targets is None:
            continue
        low, high = _RANGES[made.name]
        outside = float(((targets < low - 0.05) | (targets > high + 0.05)).float().mean())  # sync: examined
        if outside > _OUT_OF_REACH:
            return _no_learning(
                Fault.WRONG_LOSS,
                f"the model ends in a {made.name}, and {outside:.0%} of the targets are outside of what it can give",
                "leave the last activation out, or scale the targets to its range",
            )
    return None


def _wrong_sign(o: Observation) -> Diagnosis | None:
    values = [c.value for c in o.calls if c.value is not None]
    if len(values) != 1 or not values[0] > 0 or not math.isclose(o.passes[0].loss, -values[0], rel_tol=1e-3):
        return None
    if o.calls[0].name == "kl_div":
        return None
    return _no_learning(
        Fault.WRONG_LOSS,
        f"the loss is minus {o.calls[0].name}: training raises the error",
        "remove the minus sign",
    )


def _mismatched(o: Observation) -> Diagnosis | None:
    if o.own_target is None or not o.own_target < _OWN_TARGET or o.is_graph:
        return None
    return _no_learning(
        Fault.LABELS_SHUFFLED,
        f"another target for one sample changes the gradient of other samples' outputs: {o.own_target:.0%} of the change is in "
        "its own",
        "outputs and targets are flattened or sorted in different orders: look at view, reshape and transpose before the loss",
    )


def _neighbors(o: Observation) -> Diagnosis | None:
    if o.on_neighbors is None or not o.on_neighbors > _NEIGHBORS or o.is_graph:
        return None
    return _no_learning(
        Fault.BATCH_DEPENDENCE,
        "the output of a sample depends on the other samples of its batch, in evaluation mode too",
        "look for a view, reshape, softmax or attention over the batch dimension (batch_first?)",
    )


def _blind(o: Observation) -> Diagnosis | None:
    if o.on_input_fresh is None or not o.on_input_fresh < _SAME or o.on_input is None or not o.on_input < _SAME:
        return None
    return _no_learning(
        Fault.OUTPUT_INDEPENDENT_OF_INPUT,
        "the output is the same whatever the input, also with newly drawn weights",
        "follow the input through forward(): something overwrites it, masks it, or multiplies it by zero",
    )


def _sees_the_target(o: Observation) -> Diagnosis | None:
    """A sequence model that is given, at the place of a prediction, what it should predict."""
    seen = o.passes[0]
    sequences = [t for t in seen.given if t.dim() == 2 and not t.is_floating_point() and t.shape[1] > 2]
    wanted = [c.target for c in o.calls if c.name == "cross_entropy" and c.target is not None]
    if not sequences or not wanted or o.on_later is None:
        return None
    given, target = sequences[0], wanted[0].flatten()
    sees_later = o.on_later > _LATER
    if given.numel() == target.numel() and torch.equal(given.flatten(), target) and not sees_later:
        what = "targets are the inputs at the same positions, and copying is enough"
        advice = "shift the targets by one: position t predicts token t + 1"
    elif sees_later and _is_next(given, target):
        what = "position t is to predict input t + 1, and its output depends on that input"
        advice = "mask attention to later positions (is_causal=True, or a triangular mask)"
    else:
        return None
    return Diagnosis(cause=Cause.SUSPICIOUS_PERFECTION, fault=Fault.TARGET_LEAK, evidence=what, advice=advice)


def _is_next(given: Tensor, target: Tensor) -> bool:
    size, length = given.shape
    if target.numel() == size * length:
        return torch.equal(given[:, 1:], target.view(size, length)[:, :-1])
    return target.numel() == size * (length - 1) and torch.equal(given[:, 1:].flatten(), target)


def _certain(o: Observation) -> Diagnosis | None:
    if not o.certainty:
        return None
    return Diagnosis(
        cause=Cause.ENTROPY_COLLAPSE,
        evidence="with all advantages at zero the loss still falls as the entropy of the policy does",
        advice="subtract the entropy bonus from the loss: loss = policy_loss - coefficient * entropy",
    )


_CHECKS: tuple[Check, ...] = (
    _non_finite,
    _other_weights,
    _half_precision,
    _one_class_at_a_time,
    _one_target,
    _softmax_axis,
    _no_gradient_at_all,
    _no_rate,
    _constant_inputs,
    _same_batch,
    _activation_before_loss,
    _broadcast,
    _out_of_reach,
    _wrong_sign,
    _certain,
    _blind,
    _mismatched,
    _neighbors,
    _sees_the_target,
)
