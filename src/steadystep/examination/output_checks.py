"""Mistakes between outputs, targets and loss that a few passes show."""

import math

import torch
from torch import Tensor

from steadystep.diagnosis.causes import Cause, Fault
from steadystep.examination.loss_calls import LossCall, class_dim, is_distribution, is_log_distribution
from steadystep.examination.observation import CLASSES, Observation, targets_of
from steadystep.records import Diagnosis

_NEIGHBORS = 0.05  # of the spread of the outputs; rounding leaves 1e-6
_SAME = 1e-6
_OWN_TARGET = 0.3  # of the change, in the gradient of the sample's own output
_LATER = 1e-3  # of the spread of the outputs
_OUT_OF_REACH = 0.2  # of the targets
_DISTANCES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_RANGES = {"sigmoid": (0.0, 1.0), "softmax": (0.0, 1.0), "tanh": (-1.0, 1.0), "relu": (0.0, math.inf)}


def no_learning(fault: Fault, evidence: str, advice: str) -> Diagnosis:
    """A particular reason not to learn."""
    return Diagnosis(cause=Cause.NO_LEARNING, fault=fault, evidence=evidence, advice=advice)


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
            return no_learning(
                Fault.WRONG_LOSS,
                f"{wrong}: it cannot fall far below {_shown(call)}",
                "pass what it expects: logits to cross_entropy and ..._with_logits, log_softmax to nll_loss and kl_div",
            )
    return None


def _shown(call: LossCall) -> str:
    return "its present value" if call.value is None else f"{call.value:.4g}"


def softmax_axis(o: Observation) -> Diagnosis | None:
    """A softmax over one unit, over the samples, or over positions instead of classes."""
    for call in o.calls:
        made = call.origin
        if made is None or "softmax" not in made.name or made.dim is None:
            continue
        size = made.shape[made.dim]
        if size == 1:
            return no_learning(
                Fault.SOFTMAX_AXIS,
                f"a {made.name} over a single unit is constant (shape {made.shape}, dim {made.dim})",
                "use a sigmoid for one unit, or two units with a softmax",
            )
        over_batch = made.dim == 0 and len(made.shape) > 1 and size != made.shape[-1]
        over_other = call.name in CLASSES and made.dim not in (len(made.shape) - 1, 1)
        if over_batch or over_other:
            return no_learning(
                Fault.SOFTMAX_AXIS,
                f"a {made.name} over dimension {made.dim} of shape {made.shape}: over samples instead of classes",
                f"use dim={len(made.shape) - 1}, the dimension of the classes",
            )
    return None


def _broadcast(o: Observation) -> Diagnosis | None:
    size = o.passes[0].num_samples
    pairs = [
        (tuple(c.given.shape), tuple(c.target.shape)) for c in o.calls if c.name in _DISTANCES and c.target is not None
    ]
    for left, right in (*pairs, *o.passes[0].differences):
        if size > 1 and {left, right} == {(size, 1), (size,)}:
            return no_learning(
                Fault.WRONG_LOSS,
                f"outputs and targets of shapes {left} and {right}: broadcasting compares every output with every "
                "target, and the best answer is their mean",
                "squeeze the outputs or unsqueeze the targets, so that both have the same shape",
            )
    return None


def _out_of_reach(o: Observation) -> Diagnosis | None:
    targets = targets_of(o)
    for call in o.calls[:1]:
        made = call.origin
        if call.name not in _DISTANCES or made is None or made.name not in _RANGES or targets is None:
            continue
        low, high = _RANGES[made.name]
        outside = float(((targets < low - 0.05) | (targets > high + 0.05)).float().mean())  # sync: examined
        if outside > _OUT_OF_REACH:
            return no_learning(
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
    return no_learning(
        Fault.WRONG_LOSS,
        f"the loss is minus {o.calls[0].name}: training raises the error",
        "remove the minus sign",
    )


def _mismatched(o: Observation) -> Diagnosis | None:
    if o.own_target is None or not o.own_target < _OWN_TARGET or o.is_graph:
        return None
    return no_learning(
        Fault.LABELS_SHUFFLED,
        f"the target of one sample changes the gradients of other samples' outputs; {o.own_target:.0%} of the change "
        "is in its own",
        "bring outputs and targets into the same order: check view, reshape and transpose before the loss",
    )


def _neighbors(o: Observation) -> Diagnosis | None:
    if o.on_neighbors is None or not o.on_neighbors > _NEIGHBORS or o.is_graph:
        return None
    return no_learning(
        Fault.BATCH_DEPENDENCE,
        "the output of a sample depends on the other samples of its batch, in evaluation mode too",
        "look for a view, reshape, softmax or attention over the batch dimension (batch_first?)",
    )


def _blind(o: Observation) -> Diagnosis | None:
    if o.on_input_fresh is None or not o.on_input_fresh < _SAME or o.on_input is None or not o.on_input < _SAME:
        return None
    return no_learning(
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


OUTPUT_CHECKS = (
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
"""The surest first; `softmax_axis` has its own place."""
