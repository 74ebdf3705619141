"""Signs in the graph of the loss: what it depends on, what is cut off, where it is still, and where it explodes."""

from steadystep.diagnosis.facts import Facts, names
from steadystep.diagnosis.learning import (
    JUDGED_AFTER,
    base_of,
    hardly_learned,
    has_learned,
    is_judged,
    is_policy,
    learns,
    progress,
    stuck,
    supervised,
    target,
    worse_than_constant,
)
from steadystep.diagnosis.learning_evidence import dead_layer
from steadystep.diagnosis.measured import is_bias
from steadystep.diagnosis.output_evidence import first_and_last
from steadystep.records import DetectorName

CUT_OFF = "computed with, and the loss does not depend on them"
"""Said of parameters behind a detach."""
_LONG = 50  # updates
_MANY = 1 / 3  # of the trained tensors
_PART = 0.25  # of them, which is more than a spare head
_SHARP = 0.95  # the largest share of a softmax, in the mean
_STILL, _SLOW = 1e-4, 1e-3  # of the largest update, by the size of the weights
_LOUD = 1e4
_ALIKE = 1e-6  # of the size of an output
_LARGE_GAIN = 4.0  # times one over the root of the inputs
_DEEP, _FADED = 5, 1e-2  # layers; of the updates of the last ones


def never_trained(facts: Facts) -> str:
    """Many parameters that the optimizer holds and that never had a gradient."""
    seen = facts.measured
    missing = seen.untouched(facts.structure) if seen.touched and facts.trace.num_updates >= _LONG else ()
    total = len(facts.structure.trained)
    if not missing or len(missing) < _MANY * total or has_learned(facts):  # spare parts are no fault
        return ""
    how = _cut_off(facts)
    return f"{len(missing)} of {total} parameters never had a gradient ({names(missing)})" + (f"; {how}" if how else "")


def behind_no_grad(facts: Facts) -> str:
    """Parameters in the optimizer that the forward pass uses under `no_grad`, in a run that learns little."""
    last, seen = facts.measured.outputs.last, facts.measured
    blind = () if last is None else tuple(n for n in last.unlinked if n not in seen.touched)
    if not blind or facts.trace.num_updates < _LONG or learns(facts):
        return ""
    return f"{len(blind)} parameters in the optimizer are used under no_grad only ({names(blind)})"


def in_no_optimizer(facts: Facts) -> str:
    """Parameters that no optimizer holds: the last layer, or any in a run that learns little."""
    unheld, last = facts.structure.unheld, facts.measured.outputs.last
    if last is not None and last.unheld is not None:  # a target network is left out on purpose
        unheld = tuple(name for name in unheld if name in last.unheld)
    if not unheld or facts.trace.num_updates < JUDGED_AFTER or facts.opposed:
        return ""
    if last is not None and last.untrained:
        return f"the output comes from {names(last.untrained)}, which require a gradient and are in no optimizer"
    if not is_judged(facts) or learns(facts):
        return ""
    return f"{len(unheld)} parameters require a gradient and are in no optimizer ({names(unheld)})"


def outside_the_model(facts: Facts) -> str:
    """Layers that the output depends on and that are no part of the model, in a run that learns little."""
    last = facts.measured.outputs.last
    if last is None or not last.outside or learns(facts) or not is_judged(facts):
        return ""
    return (
        f"the output depends on {last.outside} parameters that are in no optimizer and not registered in the model, "
        "as in a plain list"
    )


def cut_graph(facts: Facts) -> str:
    """A part of the forward pass is taken out of the graph, in a run that learned nothing."""
    last, found = facts.measured.outputs.last, stuck(facts)
    if last is None or not last.cuts or last.terms != 1 or found is None or not found.at_base:
        return ""
    return f"the forward pass calls {', '.join(sorted(set(last.cuts)))}(), behind which no gradient gets; {found}"


def inner_axis(facts: Facts) -> str:
    """A softmax inside of the model that is over one element, in a run that learns little, or over the samples."""
    text, last = facts.measured.outputs.mistake("inner softmax-axis"), facts.measured.outputs.last
    # why with a row for each: over the instances of one bag, or the nodes of one graph, it is meant
    rows = last is not None and last.target is not None and last.shape[:1] == (last.target.rows,)
    return "" if learns(facts) and not (rows and "over the samples" in text) else text


def batch_as_time(facts: Facts) -> str:
    """A layer without batch_first that is given (batch, time, features)."""
    last = facts.measured.outputs.last
    if last is None or not last.misread or learns(facts):
        return ""
    return f"{', '.join(last.misread[:3])} is not batch_first and is given the batch as its first dimension"


def severed(facts: Facts) -> str:
    """Parameters that the forward pass computes with, while the loss does not depend on what comes out."""
    return "" if never_trained(facts) else _cut_off(facts)  # that names the fault, and says this too


def _cut_off(facts: Facts) -> str:
    last, total = facts.measured.outputs.last, len(facts.structure.trained)
    if last is None or not last.severed or facts.opposed or facts.measured.loop.turns:
        return ""
    cut = tuple(name for name in last.severed if name not in facts.measured.touched)
    if not cut or facts.trace.num_updates < _LONG or (learns(facts) and len(cut) < _PART * total):
        return ""
    by = f", behind {', '.join(sorted(set(last.cuts)))}()" if last.cuts else ""
    return f"{len(cut)} of {total} parameters are {CUT_OFF}{by} ({names(cut)})"


def never_moved(facts: Facts) -> str:
    """Weights whose gradient is there and exactly zero at every probe, beside others that move."""
    probe, seen, kept = facts.probe, facts.measured, facts.structure
    if probe is None or not seen.updated or learns(facts) or facts.trace.num_updates < JUDGED_AFTER or facts.opposed:
        return ""
    if kept.half or kept.coarse or seen.loop.turns or dead_layer(facts) or DetectorName.DEAD_UNITS in facts.warned:
        return ""  # why: rounded away, in turns, or behind units that are dead
    # why not by the update: one that is too small for the digits of a weight leaves it as it is as well
    zeros = {n for n, share in zip(probe.names, probe.zero_shares, strict=False) if share == 1.0}
    weights = [n for n in facts.weights if n in seen.touched and n not in kept.rate_zero]
    still = [n for n in weights if n in zeros and n not in seen.updated]
    if len(still) < 2 or 3 * len(still) < len(weights) or facts.stuck_at_zero:
        return ""
    return f"{len(still)} of {len(weights)} weights have a gradient that is always exactly zero ({names(still)})"


def still_layers(facts: Facts) -> str:
    """Most weights get next to nothing of the updates that others get, in a run that learns little."""
    probe = facts.probe
    if probe is None or not probe.update_rms or learns(facts) or facts.trace.num_updates < JUDGED_AFTER:
        return ""
    if never_moved(facts):
        return ""
    columns = zip(probe.names, probe.weight_rms, probe.update_rms, strict=False)
    moves = {n: update / weight for n, weight, update in columns if weight > 0.0 and not is_bias(n)}
    most = max(moves.values(), default=0.0)
    least = (_SLOW if facts.structure.scale_free else _STILL) * most
    still = [n for n, move in moves.items() if move < least and n in facts.measured.touched]
    if len(still) < 0.5 * len(moves) or len(moves) < 3:
        return ""
    share = f"{len(still)} of {len(moves)} weights ({names(still)})"
    return f"the updates of {share} are below {least / most:g} of the largest, by the size of the weights"


def fading(facts: Facts) -> str:
    """Gradients that were a hundredth in the first layers of what they were in the last, and hardly anything learned.

    Before anything was learned, by the first probe: later, layers may rest for other reasons.
    """
    probe = facts.first_probe
    if probe is None or not probe.update_rms or facts.structure.scale_free or not hardly_learned(facts):
        return ""
    columns = zip(probe.names, probe.weight_rms, probe.update_rms, strict=False)
    moves = [(n, update / weight) for n, weight, update in columns if weight > 0.0 and not is_bias(n)]
    first, last = moves[: len(moves) // 3], [move for _, move in moves[-2:]]
    if len(moves) < _DEEP or not first or not max(move for _, move in first) < _FADED * max(last):
        return ""
    names_, share = names([n for n, _ in first]), max(move for _, move in first) / max(last)
    return f"at step {probe.step} the updates of the first layers ({names_}) were {share:.1e} of those of the last"


def starved_layers(facts: Facts) -> str:
    """The same where updates are gradients: the gradient does not get there."""
    return "" if facts.structure.scale_free else still_layers(facts)


def slow_layers(facts: Facts) -> str:
    """The same where the size of the gradient does not matter: the rates of the layers are far apart."""
    return still_layers(facts) if facts.structure.scale_free else ""


def sharp_softmax(facts: Facts) -> str:
    """A softmax inside of the model that was all but certain before anything was learned."""
    first, _ = first_and_last(facts)
    if first is None or not first.sharpest > _SHARP or learns(facts) or facts.trace.num_updates < JUDGED_AFTER:
        return ""
    return (
        f"a softmax inside of the model gave {first.sharpest:.0%} to one element at step {first.step}: it is saturated"
    )


def faint_part(facts: Facts) -> str:
    """A further output of the model is the same for every sample, in a run that learns little."""
    first, last = first_and_last(facts)
    if first is None or last is None or learns(facts) or facts.opposed:
        return ""
    if not max(first.faintest, last.faintest) <= _ALIKE or first.input_spread == 0.0:
        return ""
    return (
        f"one of the model's outputs was the same for all {last.shape[0]} samples at steps {first.step} and {last.step}"
    )


def loud_start(facts: Facts) -> str:
    """Outputs and gradients that were enormous before the first update, and a loss still above a constant's."""
    found, part, norms = worse_than_constant(facts), target(facts), facts.trace.first_norms
    if found is None or found.base is None or part is None or not norms or part.std > 50.0 or abs(part.mean) > 50.0:
        return ""
    first, inputs = facts.trace.first[0], facts.inputs
    if inputs is not None and max(abs(inputs.mean), inputs.std) >= 20.0:
        return ""
    if first < 100.0 * found.base or norms[0] < 100.0:
        return ""
    return f"the first loss was {first:.3g} and its gradient norm {norms[0]:.3g}, with inputs of usual size; {found}"


def amplified(facts: Facts) -> str:
    """The same where the weights are of usual size: it is their number, or how often they are applied."""
    return "" if large_gains(facts) else _high_first_loss(facts)


def high_first_loss(facts: Facts) -> str:
    """A first loss ten times that of a constant prediction, made by weights that are too large for their inputs."""
    return _high_first_loss(facts) if large_gains(facts) else ""


def large_gains(facts: Facts) -> bool:
    """Whether any matrix began far larger than its inputs call for; true where that is unknown."""
    first = facts.measured.initial
    widths = dict(zip(facts.structure.trained, facts.structure.widths, strict=False))
    if first is None or not widths:
        return True
    return any(size * widths.get(n, 0) ** 0.5 > _LARGE_GAIN for n, size in zip(first.names, first.rms, strict=False))


def _high_first_loss(facts: Facts) -> str:
    """A first loss ten times that of a constant prediction, with inputs of usual size, in a run that learns little."""
    found, inputs = progress(facts), facts.inputs
    if found is None or found.base is None or learns(facts) or facts.trace.num_updates < JUDGED_AFTER:
        return ""
    if inputs is not None and max(abs(inputs.mean), inputs.std) >= 20.0:
        return ""
    if facts.measured.outputs.loss[0] not in ("cross-entropy", "nll") or not facts.trace.first[0] > 10.0 * found.base:
        return ""
    return f"the first loss was {facts.trace.first[0]:.3g}: wrong answers were certain before the first update; {found}"


def far_above(facts: Facts) -> str:
    """A loss of several terms that is still far above what a constant prediction has in each of them."""
    last, curve = first_and_last(facts)[1], facts.curve
    if last is None or curve is None or last.target is None or supervised(facts) or is_policy(facts) or facts.opposed:
        return ""
    base, text = base_of(last.kind, last.target)
    if base is None or last.terms < 2 or last.kind not in ("mse", "l1", "huber"):
        return ""
    if facts.trace.num_updates < JUDGED_AFTER or curve.late < 30.0 * last.terms * base:
        return ""
    if not facts.trace.first_norms[0] > 100.0:
        return ""
    if max(abs(last.target.mean), last.target.std) >= 20.0:
        return ""
    norm = facts.trace.first_norms[0]
    return f"the loss is {curve.late:.3g} and {text} {base:.3g}; the first gradient norm was {norm:.3g}"


def infinite_at_once(facts: Facts) -> str:
    """A gradient that is infinite from the first step on, in most of the model, while the loss is a number."""
    seen = facts.incidents.get("non-finite-gradient")
    if (
        seen is None
        or seen.first > 1
        or "infinite" not in seen.what
        or len(seen.names) < 3
        or facts.incidents.get("non-finite-loss")
    ):
        return ""
    return f"the loss is a number and its gradient is infinite from step {seen.first} on: it grows from layer to layer"


def loud_gradients(facts: Facts) -> str:
    """A first loss and first gradients thousands of times those at the end, with inputs and targets of usual size."""
    curve, first, norms = facts.curve, facts.trace.first, facts.trace.norms
    part, inputs = target(facts), facts.inputs
    if curve is None or not first or first[0] < _LOUD * max(abs(curve.best), 1.0) or learns(facts):
        return ""
    sizes = [max(abs(each.mean), each.std) for each in (part, inputs) if each is not None]
    early = norms[: len(norms) // 4]
    if max(sizes, default=0.0) >= 20.0 or sorted(early)[len(early) // 2] < _LOUD:
        return ""
    return (
        f"the first loss was {first[0]:.3g} and its gradient norm {norms[0]:.3g}; later losses reach {curve.best:.3g}"
    )
