"""Mistakes between outputs, targets and loss that a few passes show."""

import math

import torch
from torch import Tensor

from steadystep.diagnosis.causes import Cause, Fault
from steadystep.examination.observation import Observation, targets_of, trivial_loss
from steadystep.records import Diagnosis
from steadystep.signals.losses import (
    INNER_SOFTMAX,
    SOFTMAX_AXIS,
    WRONG_LOSS,
    class_dim,
    is_distribution,
    is_log_distribution,
    mistakes,
)

_NEIGHBORS = 0.05  # of the spread of the outputs; rounding leaves 1e-6
_SAME = 1e-6
_RAW = 20.0  # the mean size of inputs that saturate any layer
_MOSTLY = 0.5
_OWN_TARGET = 0.3  # of the change, in the gradient of the sample's own output
_LATER = 1e-3  # of the spread of the outputs
_OUT_OF_REACH = 0.2  # of the targets
_EXPECTED = (
    "pass what it expects: logits to cross_entropy and ..._with_logits, log_softmax to nll_loss and kl_div, targets of "
    "the same shape as the outputs to the others"
)
_DISTANCES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_RANGES = {"sigmoid": (0.0, 1.0), "softmax": (0.0, 1.0), "tanh": (-1.0, 1.0), "relu": (0.0, math.inf)}


def no_learning(fault: Fault, evidence: str, advice: str) -> Diagnosis:
    """A particular reason not to learn."""
    return Diagnosis(cause=Cause.NO_LEARNING, fault=fault, evidence=evidence, advice=advice)


def _mistaken_call(o: Observation) -> Diagnosis | None:
    """Loss functions that do not fit what they are called with: by the functions called, then by the numbers."""
    for fault, what in mistakes(o.calls, o.passes[0].differences):
        if fault == WRONG_LOSS:
            return no_learning(Fault.WRONG_LOSS, f"{what}{_floor(o, what)}", _EXPECTED)
    for call in o.calls:
        dim = class_dim(call.given) if call.name != "kl_div" else call.given.dim() - 1
        wrong = ""
        if call.name == "cross_entropy" and is_distribution(call.given, dim) and call.given.shape[dim] > 2:
            wrong = "cross_entropy applies a softmax to what are probabilities already"
        elif call.name in ("nll_loss", "kl_div") and not is_log_distribution(call.given, dim):
            kind = "probabilities" if is_distribution(call.given, dim) else "numbers"
            wrong = f"{call.name} wants log-probabilities and gets {kind} that are none"
        if wrong:
            return no_learning(Fault.WRONG_LOSS, f"{wrong}{_floor(o, wrong)}", _EXPECTED)
    return None


def _floor(o: Observation, what: str) -> str:
    value = o.calls[0].value if o.calls and "broadcasting" not in what else None
    return "" if value is None else f": it cannot fall far below {value:.4g}"


def softmax_axis(o: Observation) -> Diagnosis | None:
    """A softmax over one unit, over the samples, or over positions instead of classes."""
    for fault, what in mistakes(o.calls, ()):
        if fault == SOFTMAX_AXIS:
            advice = "take the softmax over the classes, which are the last dimension; use a sigmoid for a single unit"
            return no_learning(Fault.SOFTMAX_AXIS, what, advice)
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


def _outside_of_domain(o: Observation) -> Diagnosis | None:
    """Targets that the loss function is not defined for, or of which it hears one class only."""
    advice = "give the labels as the loss expects them: 0 and 1 for binary cross-entropy, -1 and 1 for margin losses"
    targets, name = targets_of(o), o.calls[0].name if o.calls else ""
    low, high = (0.0, 0.0) if targets is None else (float(targets.min()), float(targets.max()))  # sync: examined
    binary = name.startswith("binary_cross_entropy") and (low < -0.01 or high > 1.01)
    margin = name in ("soft_margin_loss", "hinge_embedding_loss") and low > -0.5 and low != high
    if binary or margin:
        return no_learning(Fault.WRONG_LOSS, f"{name} gets targets between {low:g} and {high:g}", advice)
    if o.deaf is None or o.is_adversarial:
        return None
    what = f"samples with the target {o.deaf[1]:g} have no gradient at all, only those with {o.deaf[0]:g} do"
    return no_learning(Fault.WRONG_LOSS, what, advice)


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
    if o.own_target is None or not o.own_target < _OWN_TARGET or o.is_graph or o.is_sorted:
        return None
    return no_learning(
        Fault.LABELS_SHUFFLED,
        f"the target of one sample changes the gradients of other samples' outputs; {o.own_target:.0%} of the change "
        "is in its own",
        "bring outputs and targets into the same order: check view, reshape and transpose before the loss",
    )


def _moved(o: Observation) -> Diagnosis | None:
    if not o.moves or o.is_graph or o.is_sorted:
        return None
    return no_learning(
        Fault.LABELS_SHUFFLED,
        "when the samples of a batch are exchanged, the rows of the output do not follow: they are in another order",
        "put outputs back into the order of the batch after sorting or packing, before they meet their targets",
    )


def _neighbors(o: Observation) -> Diagnosis | None:
    if o.on_neighbors is None or not o.on_neighbors > _NEIGHBORS or o.is_graph or o.is_sorted or o.rounds:
        return None
    for fault, what in mistakes((), (), o.passes[0].softmaxes, o.passes[0].num_samples):
        if fault == INNER_SOFTMAX and "over the samples" in what:
            advice = "take the softmax over the dimension that has the things to choose from"
            return no_learning(Fault.SOFTMAX_AXIS, f"{what}; outputs depend on the other samples of a batch", advice)
    return no_learning(
        Fault.BATCH_DEPENDENCE,
        "the output of a sample depends on the other samples of its batch, in evaluation mode too",
        "look for a view, reshape, softmax or attention over the batch dimension (batch_first?)",
    )


def _cut(o: Observation) -> bool:
    """Many parameters get no gradient, with newly drawn weights either: that comes first."""
    missing = [name for name in o.parameters.no_gradient if name not in o.reached_fresh]
    return len(missing) > _MOSTLY * len(o.parameters.sizes) - 1 > 0


def _blind(o: Observation) -> Diagnosis | None:
    if o.on_content is not None and o.on_content < _SAME:
        return no_learning(
            Fault.OUTPUT_INDEPENDENT_OF_INPUT,
            "the output stays the same when the ids of a sequence change and its padding does not",
            "check the padding mask: torch ignores the positions where it is True",
        )
    lifeless = max(o.saturated.values(), default=0.0) > 0.5 or max(o.dead.values(), default=0.0) > 0.9
    inputs = [t for t in o.passes[0].inputs.values() if t.is_floating_point()]
    lifeless = lifeless or any(float(t.abs().mean()) > _RAW for t in inputs)  # sync: examined
    if lifeless or o.is_solved:  # inputs or weights far too large make all outputs alike, and trials tell which
        return None
    if (
        o.alike is not None
        and o.alike > _MOSTLY
        and not o.is_adversarial
        and o.on_input_fresh is not None
        and not _cut(o)
    ):
        return no_learning(
            Fault.OUTPUT_INDEPENDENT_OF_INPUT,
            f"{o.alike:.0%} of the samples of a batch have the same output as the one before",
            "follow the samples through forward(): something pools or indexes them together",
        )
    if o.on_input_fresh is None or not o.on_input_fresh < _SAME or o.on_input is None or not o.on_input < _SAME:
        return None
    return no_learning(
        Fault.OUTPUT_INDEPENDENT_OF_INPUT,
        "the output is the same whatever the input, also with newly drawn weights",
        "follow the input through forward(): something overwrites it, masks it, or multiplies it by zero",
    )


def _blocked(o: Observation) -> Diagnosis | None:
    felt, unreached = o.blocked or (0, 0)
    if not unreached or unreached < 0.5 * felt:
        return None
    return Diagnosis(
        cause=Cause.ZERO_GRADIENT,
        evidence=f"the loss depends on {felt} positions of the sequence, and {unreached} of them get no gradient",
        advice="look for detach(), .data or no_grad() between two time steps: the state must stay in the graph",
    )


def _copied(o: Observation) -> Diagnosis | None:
    """A feature that is the target."""
    if not o.copied or o.is_adversarial:
        return None
    what = f"{o.copied} is the target in all {len(o.passes)} batches"
    advice = "take it out of the inputs: it will not be there when predictions are wanted"
    return Diagnosis(cause=Cause.SUSPICIOUS_PERFECTION, fault=Fault.TARGET_LEAK, evidence=what, advice=advice)


def _lost_in_evaluation(o: Observation) -> Diagnosis | None:
    """What was learned is gone in evaluation mode, for running statistics that are not those of the data."""
    level = trivial_loss(o)
    if o.modes is None or level is None or not o.modes.differ(level) or o.is_adversarial:
        return None
    m = o.modes
    return no_learning(
        Fault.BATCH_DEPENDENCE,
        f"the loss is {m.training:.3g} in training mode and {m.evaluating:.3g} in evaluation mode, where a constant "
        f"prediction has {level:.3g}; with running statistics of these batches it is {m.renewed:.3g}",
        "raise the momentum of batch normalization (0.1 in torch; it is the share of the new batch) (tried, learns)",
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
    _mistaken_call,
    _copied,
    _blocked,
    _out_of_reach,
    _outside_of_domain,
    _wrong_sign,
    _certain,
    _blind,
    _mismatched,
    _moved,
    _neighbors,
    _lost_in_evaluation,
    _sees_the_target,
)
"""The surest first; `softmax_axis` has its own place."""
