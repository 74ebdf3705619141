"""What outputs and gradients depend on: their own sample, its neighbors, later positions, other targets."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from steadystep._utils.tree import tensors_in
from steadystep.examination.passes import Pass, num_rows, recorded_calls
from steadystep.examination.workbench import Prepare, Workbench
from steadystep.signals.activations import evenly_chosen

_MOST_CLASSES, _FEW = 32, 6
_CERTAIN = 15.0  # the size of logits
_MOST_PLACES = 12  # positions of a sequence that are changed one by one


def _is_whole(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def by_sample(output: Tensor | None, size: int) -> Tensor | None:
    """An output with the samples first; None where no dimension is theirs."""
    if output is None or output.dim() == 0:
        return None
    if output.shape[0] == size:
        return output
    return output.movedim(1, 0) if output.dim() > 1 and output.shape[1] == size else None


def depends_on_input(bench: Workbench, batch: Any, seen: Pass, prepare: Prepare | None = None) -> float | None:
    """By how much any output changes, of its size, when the samples are exchanged; None where it cannot be told."""
    other = seen.with_inputs(batch, lambda t: t.roll(1, 0))
    if seen.num_samples < 2 or not is_changed(batch, other):
        return None
    pairs = zip(*_every_output(bench, batch, other, prepare=prepare), strict=False)
    changes = [_change(one, two) for one, two in pairs if one.shape == two.shape]
    return max(changes, default=None)


def ignored_inputs(bench: Workbench, seen: Pass, prepare: Prepare) -> tuple[str, ...]:
    """Inputs that differ between samples and that the loss does not notice, with present and with new weights."""
    named = [n for n, t in seen.inputs.items() if t.dim() > 1 and num_rows(t) == seen.num_samples > 3 and _differs(t)]
    if len(named) < 2:
        return ()
    unnoticed = set(named)
    for change in (None, prepare):
        with bench.set_aside():
            if change is not None:
                change(bench.model, bench.optimizer)
            for batch in bench.batches[:2]:
                plain = bench.losses([batch])[0]
                for name in list(unnoticed):
                    try:
                        other = bench.losses([seen.with_one_input(batch, name, lambda t: t.roll(1, 0))])[0]
                    except Exception:  # why all: the changed batch may not fit the user's loss
                        other = math.nan
                    if not abs(other - plain) <= 1e-7 * abs(plain):
                        unnoticed.discard(name)
    return tuple(name for name in named if name in unnoticed)


def _differs(tensor: Tensor) -> bool:
    return bool((tensor != tensor[:1]).any())  # sync: examined


def depends_on_content(bench: Workbench, batch: Any, seen: Pass, prepare: Prepare | None = None) -> float | None:
    """The same for sequences of ids whose padding stays where it is: only which ids there are changes."""
    ids = [t for t in seen.inputs.values() if t.dim() == 2 and _is_whole(t) and t.shape[1] > 3]
    if not ids or seen.num_samples < 2 or not bool((ids[0] == 0).any()):  # sync: examined
        return None

    def others(tensor: Tensor) -> Tensor:
        if tensor.dim() != 2 or not _is_whole(tensor):
            return tensor
        kept = tensor[tensor != 0]
        other = tensor.clone()
        other[tensor != 0] = kept.flip(0)
        return other

    pairs = zip(*_every_output(bench, batch, seen.with_inputs(batch, others), prepare=prepare), strict=False)
    return max((_change(one, two) for one, two in pairs if one.shape == two.shape), default=None)


def blocked_positions(bench: Workbench, batch: Any, seen: Pass) -> tuple[int, int] | None:
    """Of how many positions of a sequence the loss depends on, and to how many of these no gradient comes back."""
    tensor = next((t for t in seen.inputs.values() if t.dim() == 3 and t.is_floating_point()), None)
    if tensor is None or tensor.shape[1] < 3 or num_rows(tensor) != seen.num_samples or min(tensor.shape[2:]) > 64:
        return None
    given = tensor.detach().clone().requires_grad_()
    wanted = seen.with_inputs(batch, lambda t: given if t is tensor else t)
    with bench.set_aside():
        try:
            gradient: Tensor | None = torch.autograd.grad(bench.loss(wanted), given, allow_unused=True)[0]
            plain = bench.losses([batch])[0]
            places = evenly_chosen(range(tensor.shape[1]), _MOST_PLACES)
            changes = [_changed_at(bench, batch, seen, tensor, place) - plain for place in places]
        except Exception:  # why all: what the loss makes of its inputs may not be differentiable
            return None
    if gradient is None:
        return None
    reached = gradient.abs().amax((0, 2))[places].tolist()  # sync: examined
    felt = [abs(change) > 1e-5 * max(abs(plain), 1e-12) for change in changes]
    return sum(felt), sum(f and not r for f, r in zip(felt, reached, strict=True))


def _changed_at(bench: Workbench, batch: Any, seen: Pass, tensor: Tensor, place: int) -> float:
    other = tensor.clone()
    other[:, place] = tensor[:, place].roll(1, 0) + 0.1
    return bench.losses([seen.with_inputs(batch, lambda t: other if t is tensor else t)])[0]


def share_alike(bench: Workbench, batch: Any, seen: Pass, prepare: Prepare) -> float | None:
    """The share of samples whose first output is that of the sample before; None where there is no row for each."""
    (output,) = first_outputs(bench, batch, prepare=prepare)
    if output is None or output.dim() < 2 or num_rows(output) < 4 or seen.num_samples < 4:
        return None
    flat = output.flatten(1)
    apart = (flat - flat.roll(1, 0)).abs().amax(1) > 1e-6 * flat.square().mean().sqrt()
    return 1.0 - float(apart.float().mean())  # sync: examined


def is_changed(batch: Any, other: Any) -> bool:
    """Whether the exchange of samples reached a tensor: those inside of plain objects stay as they are."""
    pairs = zip(tensors_in(batch), tensors_in(other), strict=True)
    return any(one is not two for (_, one), (_, two) in pairs)


def _change(one: Tensor, two: Tensor) -> float:
    return float((two - one).abs().max() / one.abs().max().clamp_min(1e-12))  # sync: examined


def spread_of_outputs(bench: Workbench, batch: Any, seen: Pass, prepare: Prepare | None = None) -> float | None:
    """The mean of 1 - cosine between the outputs of two samples; None where there is no vector per sample."""
    (output,) = first_outputs(bench, batch, prepare=prepare)
    if output is None or output.dim() != 2 or output.shape[1] < 2 or num_rows(output) < 2:
        return None
    output = output.detach()
    return float(1.0 - torch.cosine_similarity(output, output.roll(1, 0), dim=1).mean())  # sync: examined


def depends_on_neighbors(bench: Workbench, batch: Any, seen: Pass) -> float | None:
    """By how much the output of a sample changes when all others are exchanged, of the outputs' spread.

    The largest of the first, the middle and the last sample: where samples are taken for time, the first sees none.
    """
    size = seen.num_samples
    if size < 3 or not seen.inputs:
        return None
    places = (0, size // 2, size - 1)
    turned = [seen.with_inputs(batch, partial(_others_turned, place=place)) for place in places]
    plain, *others = [by_sample(output, size) for output in first_outputs(bench, batch, *turned)]
    if plain is None or any(o is None or o.shape != plain.shape for o in others):
        return None
    spread = plain.std().clamp_min(1e-6 * plain.abs().max()).clamp_min(1e-12)
    changes = [(o[p] - plain[p]).abs().max() / spread for o, p in zip(others, places, strict=True) if o is not None]
    return max(float(change) for change in changes)  # sync: examined


def _others_turned(tensor: Tensor, place: int) -> Tensor:
    """All samples but one in reversed order, and twice as large where they are real numbers."""
    other = tensor.flip(0) * 2 if tensor.is_floating_point() else tensor.flip(0)
    other[place] = tensor[place]
    return other


def depends_on_later(bench: Workbench, batch: Any, seen: Pass) -> float | None:
    """By how much the first outputs of a sequence change with its later inputs, of the outputs' spread."""
    sequences = [t for t in seen.inputs.values() if t.dim() == 2 and _is_whole(t) and t.shape[1] > 3]
    if not sequences or seen.num_samples < 2:
        return None
    length = sequences[0].shape[1]
    half = length // 2

    def changed(tensor: Tensor) -> Tensor:
        if tensor.dim() != 2 or tensor.shape[1] != length:
            return tensor
        return torch.cat([tensor[:, : half + 1], tensor[:, half + 1 :].roll(1, 0)], dim=1)

    pair = first_outputs(bench, batch, seen.with_inputs(batch, changed))
    plain, other = (by_sample(output, seen.num_samples) for output in pair)
    if plain is None or other is None or plain.shape != other.shape or plain.dim() != 3 or plain.shape[1] < length - 1:
        return None
    change = (other[:, : half + 1] - plain[:, : half + 1]).abs().max()
    return float(change / plain.std().clamp_min(1e-12))  # sync: examined


def share_of_own_target(bench: Workbench, batch: Any, seen: Pass) -> float | None:
    """How much of the change that the target of one sample makes is in the gradient of that sample's own output."""
    size = seen.num_samples
    if size < 4 or not seen.targets or max(num_rows(t) for t in seen.targets.values()) != size:
        return None
    place = size // 2
    changed = seen.with_targets(batch, lambda t: _other_target(t, place))
    with bench.set_aside():
        bench.model.eval()
        plain, other = (by_sample(_output_gradient(bench, each), size) for each in (batch, changed))
    if plain is None or other is None or plain.shape != other.shape:
        return None
    change = (other - plain).float().square().reshape(size, -1).sum(1)
    total = float(change.sum())  # sync: examined
    return float(change[place]) / total if total > 0 and math.isfinite(total) else None


def deaf_classes(bench: Workbench, seen: Pass, prepare: Prepare) -> tuple[float, float] | None:
    """With newly drawn weights: the only class whose samples give a gradient, and one whose samples give none."""
    found = [t for t in seen.targets.values() if num_rows(t) == seen.num_samples]
    # why not boolean: a mask that picks samples leaves the others without a gradient as well
    whole = len(found) == 1 and (_is_whole(found[0]) or _is_rounded(found[0])) and found[0].dtype is not torch.bool
    if not whole or len(torch.unique(found[0])) > _MOST_CLASSES:
        return None
    felt: dict[float, bool] = {}
    with bench.set_aside():
        prepare(bench.model, bench.optimizer)
        if max((float(t.detach().abs().max()) for t in _outputs(bench, bench.batches[0])), default=0.0) > _CERTAIN:
            return None  # why: outputs so large that a softmax is exactly 1 leave no gradient either
        for batch in bench.batches[:_FEW]:
            target = next(
                (t for n, t in tensors_in(batch) if n in seen.targets and num_rows(t) == num_rows(found[0])), None
            )
            gradient = _output_gradient(bench, batch)
            if target is None or gradient is None or gradient.shape[: target.dim()] != target.shape:
                return None
            sizes = gradient.reshape(*target.shape, -1).abs().amax(-1)
            for value in torch.unique(target).tolist():  # sync: examined
                felt[value] = felt.get(value, False) or bool((sizes[target == value] > 0).any())  # sync: examined
    loud, deaf = [v for v, is_felt in felt.items() if is_felt], [v for v, is_felt in felt.items() if not is_felt]
    return (loud[0], deaf[0]) if len(loud) == 1 and deaf else None


def _is_rounded(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool((tensor == tensor.round()).all())  # sync: examined


def _other_target(tensor: Tensor, place: int) -> Tensor:
    """The same targets but for one sample, which gets another."""
    other = tensor.clone()
    if tensor.is_floating_point():
        other[place] = tensor[place] + tensor.std() + 1.0
    else:
        different = (tensor != tensor[place]).reshape(num_rows(tensor), -1).any(1).nonzero()
        if len(different):
            other[place] = tensor[int(different[0])]  # sync: examined
    return other


def rewards_certainty(bench: Workbench, batch: Any, seen: Pass) -> bool:
    """Whether, with all advantages at zero, the loss of a policy still falls as its entropy does."""
    actions = [t for t in seen.targets.values() if _is_whole(t) and num_rows(t) == seen.num_samples]
    weights = [t for t in seen.targets.values() if t.is_floating_point() and t.dim() == 1]
    logits = [t for t in seen.outputs if t.dim() == 2 and t.shape[1] > 1 and num_rows(t) == seen.num_samples]
    if not actions or not weights or not logits or seen.calls:
        return False
    without = seen.with_targets(batch, lambda t: torch.zeros_like(t) if t.is_floating_point() else t)
    with bench.set_aside():
        gradient = _output_gradient(bench, without, shape=logits[0].shape)
    if gradient is None or not bool(gradient.any()):  # sync: examined
        return False
    scores = logits[0].detach().clone().requires_grad_()
    logs = scores.log_softmax(1)
    (rising,) = torch.autograd.grad(-(logs.exp() * logs).sum(), scores)
    return float(torch.cosine_similarity(gradient.flatten(), rising.flatten(), dim=0)) > 0.3  # sync: examined


def _output_gradient(bench: Workbench, batch: Any, shape: torch.Size | None = None) -> Tensor | None:
    """The gradient of the loss with respect to the model's first output, or the first of this shape."""
    with recorded_calls(bench.model) as calls:
        try:
            loss = bench.loss(batch)
            outputs = [t for call in calls for _, t in tensors_in(call.output) if t.requires_grad and t.dim()]
            outputs = [t for t in outputs if shape is None or t.shape == shape]
            return torch.autograd.grad(loss, outputs[0])[0] if outputs else None
        except Exception:  # why all: the changed batch may not fit the user's loss
            return None


def first_outputs(bench: Workbench, *batches: Any, prepare: Prepare | None = None) -> list[Tensor | None]:
    """The model's first output for each batch, in evaluation mode: neither dropout nor batch statistics."""
    return [outputs[0] if outputs else None for outputs in _every_output(bench, *batches, prepare=prepare)]


def _every_output(bench: Workbench, *batches: Any, prepare: Prepare | None = None) -> list[list[Tensor]]:
    with bench.set_aside(), torch.no_grad():
        if prepare is not None:
            prepare(bench.model, bench.optimizer)
        bench.model.eval()  # `set_aside` puts the modes back
        return [_outputs(bench, batch) for batch in batches]


def _outputs(bench: Workbench, batch: Any) -> list[Tensor]:
    torch.manual_seed(0)
    with recorded_calls(bench.model) as calls:
        try:
            bench.loss(batch)
        except Exception:  # why all: the changed batch may not fit the user's loss
            return []
    found = [t for call in calls for _, t in tensors_in(call.output) if t.is_floating_point() and t.dim()]
    return [t.float() for t in found]
