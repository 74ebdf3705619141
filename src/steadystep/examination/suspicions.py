"""What cannot be meant, but is a fault only where a job is not known to learn."""

from collections.abc import Iterator

from steadystep.diagnosis.causes import Cause, Fault
from steadystep.examination.observation import Observation, targets_of
from steadystep.examination.output_checks import no_learning
from steadystep.records import Diagnosis
from steadystep.signals.loss_calls import DISTANCES
from steadystep.signals.losses import INNER_SOFTMAX, mistakes

_TIMES, _FAR = 1e3, 20.0


def suspects(o: Observation) -> Iterator[Diagnosis]:
    """What cannot be meant, but is a fault only where the job is not known to learn well."""
    for fault, what in mistakes((), (), o.passes[0].softmaxes, o.passes[0].num_samples):
        if fault == INNER_SOFTMAX:
            advice = "take the softmax over the dimension that has the things to choose from"
            yield no_learning(Fault.SOFTMAX_AXIS, what, advice)
            break
    if o.ignored and not o.is_graph:
        what = f"the loss stays the same whatever {', '.join(o.ignored)} of the batch is, also with newly drawn weights"
        advice = "follow that input through the loss: something overwrites it, cuts it off or multiplies it by zero"
        yield no_learning(Fault.OUTPUT_INDEPENDENT_OF_INPUT, what, advice)
    yield from _drowned(o)
    call, targets = o.calls[0] if o.calls else None, targets_of(o)
    made = None if call is None else call.origin
    if call is None or made is None or targets is None or call.name not in DISTANCES or made.name != "softmax":
        return
    if bool(((targets == 0) | (targets == 1)).all()):  # sync: examined
        what = f"the loss is {call.name} between a softmax and labels, and its gradient vanishes where it is wrong"
        yield no_learning(Fault.WRONG_LOSS, what, "use cross_entropy, on logits")


def _drowned(o: Observation) -> Iterator[Diagnosis]:
    """A term of the loss beside one that is a thousand times as large, for targets of that scale."""
    terms = [(c.value, c) for c in o.calls if c.value is not None and c.value > 0.0 and c.target is not None]
    if len(terms) < 2 or o.is_adversarial:
        return
    (least, small), (most, large) = min(terms, key=lambda t: t[0]), max(terms, key=lambda t: t[0])
    size = float(large.target.float().square().mean().sqrt()) if large.target is not None else 0.0  # sync: examined
    if large.name in DISTANCES and most > _TIMES * least and size > _FAR:
        what = f"{large.name} with targets of size {size:.3g} is {most:.3g}, beside {small.name} of {least:.3g}"
        yield Diagnosis(
            cause=Cause.UNSCALED_DATA,
            fault=Fault.UNSCALED_TARGETS,
            evidence=f"{what}: nothing else in the loss counts",
            advice="standardize these targets, so that all terms of the loss are of the same order",
        )
